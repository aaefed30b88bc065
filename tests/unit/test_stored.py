from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server import stored as module
from weightpush_server.stored import OpenCheckpoint, StoredCheckpoint, StoredFile, StoredLayout, StoredTensor

TENSORS = {
    "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int32),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor([True, False]),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(path: Path, start: int) -> StoredCheckpoint:
    """Write all tensors behind ``start`` bytes, without any alignment."""
    entries, content = [], b"\xff" * start
    for name, tensor in TENSORS.items():
        entries.append(StoredTensor(spec=TensorSpec.of(name, tensor), file=0, offset=len(content)))
        content += raw(tensor)
    path.write_bytes(content)
    return StoredCheckpoint((StoredFile(path=str(path)),), StoredLayout(tuple(entries)))


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("start", [0, 1, 3, 8])
def test_tensors_are_read_wherever_they_start(tmp_path: Path, start: int, in_memory: bool) -> None:
    stored = write(tmp_path / "file", start)
    stored = replace(stored, files=(StoredFile(path=str(tmp_path / "file"), in_memory=in_memory),))
    again = StoredCheckpoint.from_json(stored.to_json())
    assert again == stored
    opened = OpenCheckpoint(again)
    found = {entry.spec.name: opened.read(entry) for entry in again.tensors}
    opened.close()
    opened.close()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    assert stored.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_pieces_keep_the_order_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write(tmp_path / "file", 0)
    monkeypatch.setattr(module, "PIECE_BYTES", 14)
    pieces = stored.layout.pieces
    assert [name for piece in pieces for name in piece.table.names] == list(TENSORS)
    assert all(len(piece.table.names) == 1 or piece.nbytes <= 14 for piece in pieces)
    assert len(pieces) >= 3


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_short_or_missing_file_is_refused_before_anything_is_read(tmp_path: Path, in_memory: bool) -> None:
    path = tmp_path / "file"
    stored = write(path, 0)
    stored = replace(stored, files=(StoredFile(path=str(path), in_memory=in_memory),))
    before = len(os.listdir("/proc/self/fd"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(WeightPushError, match="too few for 'flag'") as short:
        OpenCheckpoint(stored)
    assert short.value.code is ErrorCode.LANDING_FAILED
    assert short.value.details == {"path": str(path), "tensor": "flag"}
    path.unlink()
    with pytest.raises(WeightPushError, match="No such file"):
        OpenCheckpoint(stored)
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    stored = write(path, 0)
    opened = OpenCheckpoint(stored)
    os.truncate(path, 20)
    with pytest.raises(WeightPushError, match="became shorter while 'wide' was read"):
        opened.read(stored.tensors[0])
    opened.close()


def test_a_file_that_is_replaced_is_still_the_one_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    stored = write(path, 0)
    opened = OpenCheckpoint(stored)
    (tmp_path / "new").write_bytes(b"\0" * path.stat().st_size)
    (tmp_path / "new").rename(path)
    assert torch.equal(opened.read(stored.tensors[0]), TENSORS["wide"])
    opened.close()
