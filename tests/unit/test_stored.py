from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server import stored as module
from weightpush_server.prefault import prefault
from weightpush_server.stored import (
    OpenCheckpoint,
    StoredCheckpoint,
    StoredFile,
    StoredLayout,
    StoredTensor,
    view_tensor,
)

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


def test_a_piece_stays_in_one_file_goes_upwards_and_reads_over_little() -> None:
    spec = TensorSpec(name="t", dtype="uint8", shape=(10,))
    places = [(0, 100), (0, 110), (0, 50), (0, 60), (1, 70), (1, 80), (1, 80 + 4 * module.PIECE_BYTES)]
    layout = StoredLayout(tuple(StoredTensor(spec=spec, file=file, offset=offset) for file, offset in places))
    assert [(piece.file, len(piece.table.names), piece.first) for piece in layout.pieces] == [
        (0, 2, 0),
        (0, 2, 2),
        (1, 2, 4),
        (1, 1, 6),
    ]
    for piece in layout.pieces:
        assert piece.start % 64 == 0
        found = [piece.start + offset for offset, _ in piece.table.places]
        assert found == [offset for _, offset in places[piece.first :][: len(found)]]
        assert piece.end == found[-1] + 10


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("start", [0, 3, 100])
@pytest.mark.parametrize("piece_bytes", [1, 30, 10_000])
def test_pieces_hold_the_bytes_of_their_tensors(
    tmp_path: Path, start: int, in_memory: bool, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write(tmp_path / "file", start)
    # Of an empty tensor nothing is read, wherever it is said to stand.
    tensors = [t.model_copy(update={"offset": 10_000}) if t.spec.name == "empty" else t for t in stored.tensors]
    file = StoredFile(path=str(tmp_path / "file"), in_memory=in_memory)
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    opened = OpenCheckpoint(StoredCheckpoint((file,), StoredLayout(tuple(tensors))))
    seen: list[str] = []
    for piece, buffer in opened.pieces():
        assert buffer.numel() == piece.end - piece.start
        for (spec, offset), (_, nbytes) in zip(piece.table.entries, piece.table.places, strict=True):
            assert buffer[offset : offset + nbytes].numpy().tobytes() == raw(TENSORS[spec.name])
            assert torch.equal(view_tensor(buffer, offset, spec), TENSORS[spec.name])
            seen.append(spec.name)
    assert seen == list(TENSORS)
    opened.close()


def test_a_layout_that_comes_again_is_known(tmp_path: Path) -> None:
    text = write(tmp_path / "file", 0).to_json()
    first = StoredCheckpoint.from_json(text)
    other_file = write(tmp_path / "other", 0).to_json()
    again = StoredCheckpoint.from_json(other_file)
    assert again.layout is first.layout
    assert again.files != first.files
    assert StoredCheckpoint.from_json(write(tmp_path / "file", 8).to_json()).layout != first.layout


def test_pages_of_files_in_memory_are_mapped_before_they_are_read(tmp_path: Path) -> None:
    nbytes = 9 * 2**20 + 5000  # More than is asked for at once, and no multiple of it.
    path = tmp_path / "file"
    path.write_bytes(b"x" * nbytes)
    tensor = StoredTensor(spec=TensorSpec(name="t", dtype="uint8", shape=(nbytes,)), file=0, offset=0)
    opened = OpenCheckpoint(StoredCheckpoint((StoredFile(path=str(path), in_memory=True),), StoredLayout((tensor,))))
    memory = opened._mapped[0]
    assert not any(present(memory))
    assert not prefault(memory, lambda: False)
    assert not any(present(memory))
    if not prefault(memory[:4096], lambda: True):
        pytest.skip("this kernel cannot map pages ahead (before Linux 5.14)")
    opened.prefault()
    assert all(present(memory))
    opened.close()
    opened.prefault()  # As a thread that comes late: there is nothing left to do.
    assert bytes(memory[-3:].tolist()) == b"xxx"


def present(memory: torch.Tensor) -> list[bool]:
    """Say of each page under ``memory`` whether this process has it mapped."""
    page = os.sysconf("SC_PAGESIZE")
    first, count = memory.data_ptr() // page, -(-memory.numel() // page)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = struct.unpack(f"<{count}Q", pages.read(8 * count))
    return [bool(entry >> 63) for entry in entries]


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
    os.truncate(path, 50)
    with pytest.raises(WeightPushError, match="became shorter while 'half' was read") as short:
        next(opened.pieces())
    assert short.value.details["tensor"] == "half"
    opened.close()


def test_a_file_that_is_replaced_is_still_the_one_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    stored = write(path, 0)
    opened = OpenCheckpoint(stored)
    (tmp_path / "new").write_bytes(b"\0" * path.stat().st_size)
    (tmp_path / "new").rename(path)
    assert torch.equal(opened.read(stored.tensors[0]), TENSORS["wide"])
    opened.close()
