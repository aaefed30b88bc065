"""Landing what lies in files, through the same session as a push: the same bytes, the same refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.toy import CPU, Started, checkpoint, cold_start, contents, differing
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server import stored as stored_module
from weightpush_server.hostcopy import HostCopy
from weightpush_server.progress import ProgressWriter
from weightpush_server.records import ControlRecord, WorkerRecord
from weightpush_server.reload import finish_reload
from weightpush_server.reload import plan as plan_module
from weightpush_server.reload.batch import Batch
from weightpush_server.shared_state import SharedState
from weightpush_server.stored import OpenCheckpoint, StoredCheckpoint, StoredFile, StoredLayout, StoredTensor
from weightpush_server.worker_update import WorkerUpdate

A, B = checkpoint(1), checkpoint(2)


@pytest.fixture
def progress(tmp_path: Path) -> ProgressWriter:
    control = ControlRecord(instance_id="i", weight_version="v0")
    shared = SharedState.create(tmp_path / "state", workers=1, control=control)
    writer = ProgressWriter(shared, WorkerRecord(rank=0, pid=1, device="cpu", weight_version="v0"))
    writer.begin(7)
    return writer


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "PIECE_BYTES", 300)


def stored(tensors: dict[str, torch.Tensor], *, digests: bool = False) -> HostCopy:
    copy = HostCopy()
    for name, tensor in tensors.items():
        copy.add(TensorSpec.of(name, tensor), tensor.contiguous().reshape(-1).view(torch.uint8))
        if digests:
            copy.digests[name] = tensor_digest(tensor)
    return copy


def land(
    live: Started,
    source: HostCopy | StoredCheckpoint,
    progress: ProgressWriter,
    *,
    take_digests: bool = True,
    keep: bool = False,
    planned: bool = True,
    check_wanted: Callable[[], None] = lambda: None,
) -> WorkerUpdate:
    described = StoredCheckpoint.from_json((source.describe() if isinstance(source, HostCopy) else source).to_json())
    plan = live.plan({spec.name: torch.empty(spec.shape, dtype=spec.torch_dtype) for spec in described.specs})
    update = WorkerUpdate(7, described.specs, copy=HostCopy() if keep else None)
    update.read_from(OpenCheckpoint(described), take_digests=take_digests)
    update.attach(live.begin(plan=plan if planned else None))
    update.land(
        device=CPU,
        progress=progress,
        check_wanted=check_wanted,
        is_mine=lambda number: number % 2 == 0,
        copy_too=keep,
    )
    update.stop()
    return update


def written(folder: Path, tensors: dict[str, torch.Tensor], *, shift: int, in_memory: bool) -> StoredCheckpoint:
    """Write ``tensors`` one by one into two files, in turns, behind ``shift`` bytes."""
    content = [b"\xff" * shift, b"\xff" * shift]
    entries = []
    for number, (name, tensor) in enumerate(tensors.items()):
        file = number // 3 % 2
        entries.append(StoredTensor(spec=TensorSpec.of(name, tensor), file=file, offset=len(content[file])))
        content[file] += tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    for number, part in enumerate(content):
        (folder / f"part-{number}").write_bytes(part)
    files = tuple(StoredFile(path=str(folder / f"part-{number}"), in_memory=in_memory) for number in range(2))
    return StoredCheckpoint(files, StoredLayout(tuple(entries)))


@pytest.mark.parametrize("shift", [0, 1, 2, 8])
@pytest.mark.parametrize("in_memory", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("planned", [True, False], ids=["by plan", "by the model's loaders"])
def test_wherever_they_lie_the_model_is_that_of_a_cold_start(
    tmp_path: Path, progress: ProgressWriter, shift: int, in_memory: bool, planned: bool
) -> None:
    live, wanted = cold_start(A), cold_start(B)
    update = land(live, written(tmp_path, B, shift=shift, in_memory=in_memory), progress, planned=planned, keep=True)
    finish_reload(update.opened)
    assert differing(contents(live.model), contents(wanted.model)) == []
    assert update.copy is not None
    again = OpenCheckpoint(update.copy.describe())
    assert all(torch.equal(again.read(entry), B[entry.spec.name]) for entry in again.stored.tensors)
    again.close()


def test_what_was_worked_out_for_a_layout_holds_for_the_next_push_of_it(
    progress: ProgressWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, worked_out = cold_start(A), []
    make_batches = plan_module.make_batches

    def noted(*args: Any) -> tuple[Batch, ...]:
        worked_out.append(args)
        return make_batches(*args)

    monkeypatch.setattr(plan_module, "make_batches", noted)
    plan = live.plan(B)
    for tensors in (B, A, B):
        source = stored(tensors)
        described = StoredCheckpoint.from_json(source.describe().to_json())
        update = WorkerUpdate(7, described.specs)
        update.read_from(OpenCheckpoint(described), take_digests=False)
        progress.update(epoch=7, source_ready=False)
        update.foresee(plan, progress, hurry=False)
        deadline = time.monotonic() + 30
        while not progress.record.source_ready:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(worked_out) == len(described.layout.pieces)
        update.attach(live.begin(plan=plan))
        update.land(device=CPU, progress=progress, check_wanted=lambda: None, is_mine=lambda _: True, copy_too=False)
        finish_reload(update.opened)
        update.stop()
        assert differing(contents(live.model), contents(cold_start(tensors).model)) == []
    assert len(worked_out) == len(described.layout.pieces)


def test_where_nobody_is_served_nothing_is_waited_for(
    progress: ProgressWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, source = cold_start(A), stored(B)
    monkeypatch.setattr(OpenCheckpoint, "prefault", lambda self: pytest.fail("there was a hurry"))
    update = WorkerUpdate(7, source.describe().specs)
    update.read_from(OpenCheckpoint(source.describe()), take_digests=False)
    assert not progress.record.source_ready
    update.foresee(live.plan(B), progress, hurry=True)
    assert progress.record.source_ready
    update.stop()


def test_stored_tensors_land_like_pushed_ones(progress: ProgressWriter) -> None:
    live, wanted = cold_start(A), cold_start(B)
    update = land(live, stored(B), progress, keep=True)
    finish_reload(update.opened)
    assert differing(contents(live.model), contents(wanted.model)) == []
    # This rank's share of the digests, and a copy of all that landed.
    assert update.digests == {name: tensor_digest(B[name]) for name in list(B)[::2]}
    assert update.copy is not None
    again = OpenCheckpoint(update.copy.describe())
    assert all(torch.equal(again.read(entry), B[entry.spec.name]) for entry in again.stored.tensors)
    again.close()
    record = progress.record
    assert (record.tensors_done, record.bytes_done) == (len(B), sum(tensor.nbytes for tensor in B.values()))


@pytest.mark.parametrize("known", [False, True])
def test_known_digests_are_not_taken_again(progress: ProgressWriter, known: bool) -> None:
    update = land(cold_start(A), stored(B, digests=known), progress, take_digests=False)
    assert update.digests == ({name: tensor_digest(tensor) for name, tensor in B.items()} if known else {})


def test_landing_stops_when_nobody_wants_it(progress: ProgressWriter) -> None:
    live, asked = cold_start(A), []

    def gone() -> None:
        asked.append(progress.record.tensors_done)
        if len(asked) == 3:
            raise WeightPushError(ErrorCode.ABORTED, "given up")

    with pytest.raises(WeightPushError, match="given up"):
        land(live, stored(B), progress, check_wanted=gone)
    assert asked[-1] < len(B)
    # And the next, whole one repairs the model.
    finish_reload(land(live, stored(A), progress).opened)
    assert differing(contents(live.model), contents(cold_start(A).model)) == []


def test_what_is_missing_is_named_at_the_close(progress: ProgressWriter) -> None:
    live = cold_start(A)
    part = {name: tensor for name, tensor in B.items() if name != "table.weight"}
    described = stored(part)
    update = WorkerUpdate(7, described.describe().specs)
    update.attach(live.begin(plan=live.plan(B)))
    with pytest.raises(WeightPushError, match="where they lie"):
        update.land(device=CPU, progress=progress, check_wanted=lambda: None, is_mine=lambda _: True, copy_too=False)
    update.read_from(OpenCheckpoint(described.describe()), take_digests=True)
    update.land(device=CPU, progress=progress, check_wanted=lambda: None, is_mine=lambda _: True, copy_too=False)
    with pytest.raises(WeightPushError, match=r"table\.weight") as unproven:
        finish_reload(update.opened)
    assert unproven.value.code is ErrorCode.PROOF_FAILED


def test_nothing_lands_before_the_model_is_open(progress: ProgressWriter) -> None:
    update = WorkerUpdate(7, ())
    with pytest.raises(WeightPushError, match="before the model was opened"):
        _ = update.opened
    assert update.stop() is None
