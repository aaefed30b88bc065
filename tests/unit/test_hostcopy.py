from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import BucketTable, TensorSpec
from weightpush_protocol.status import CopyRole
from weightpush_server import hostcopy as module
from weightpush_server.hostcopy import HostBudget, HostCopies, HostCopy, HostFile, no_copy
from weightpush_server.stored import OpenCheckpoint, StoredCheckpoint


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def copy_of(**tensors: torch.Tensor) -> HostCopy:
    copy = HostCopy()
    for name, tensor in tensors.items():
        copy.add(TensorSpec.of(name, tensor), raw(tensor))
        copy.digests[name] = f"digest of {name} {tensor.flatten()[:1].tolist()}"
    return copy


def values(copy: HostCopy) -> dict[str, list[float]]:
    opened = OpenCheckpoint(copy.describe())
    found = {entry.spec.name: opened.read(entry).flatten().tolist() for entry in opened.stored.tensors}
    opened.close()
    return found


def held() -> int:
    """Count the copies' files that this process has open."""
    gc.collect()
    names = (
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    )
    # Not the buckets of pushes that other tests made.
    return sum(name == "/memfd:weightpush (deleted)" for name in names)


def full(value: float, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(value))


def copies(*, keep: bool = True, limit: int | None = None) -> HostCopies:
    return HostCopies(keep=keep, budget=HostBudget(limit))


def commit(kept: HostCopies, epoch: int, version: str, copy: HostCopy | None, **options: object) -> None:
    kept.expect(epoch, version, copy, **options)  # type: ignore[arg-type] # options of many types
    kept.settle(epoch)


def served(kept: HostCopies) -> dict[str, list[float]]:
    return values(kept.kept(CopyRole.SERVED)[1])


def _read(described: str, pipe: Connection) -> None:
    opened = OpenCheckpoint(StoredCheckpoint.from_json(described))
    pipe.send({entry.spec.name: opened.read(entry).tolist() for entry in opened.stored.tensors})
    opened.close()


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    before = held()
    yield
    assert held() == before


def test_another_process_reads_what_was_written() -> None:
    copy = copy_of(first=full(1), odd=torch.tensor([7], dtype=torch.int8), second=full(2), empty=torch.empty(0))
    assert all(tensor.offset % 64 == 0 for tensor in copy.tensors.values())
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("fork").Process(target=_read, args=(copy.describe().to_json(), theirs))
    reader.start()
    theirs.close()
    assert ours.recv() == {"first": [1, 1, 1], "odd": [7], "second": [2, 2, 2], "empty": []}
    reader.join()
    ours.close()


@pytest.mark.parametrize("kind", ["as buckets are", "behind a header", "not aligned", "with a hole"])
def test_a_bucket_is_taken_in_whole_where_it_can_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"wide": torch.arange(3, dtype=torch.float64), "half": full(2).half(), "empty": torch.empty(0, 2)}
    content = {"as buckets are": b"", "behind a header": b"{}123456", "not aligned": b"", "with a hole": b""}[kind]
    entries = []
    for name in ("half", "wide", "empty") if kind == "not aligned" else tensors:
        entries.append((TensorSpec.of(name, tensors[name]), len(content)))
        content += raw(tensors[name]).numpy().tobytes() + (b"hole" * 2 if kind == "with a hole" else b"")
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    writes: list[int] = []
    append = HostFile.append

    def counted(file: HostFile, raw: torch.Tensor) -> int:
        writes.append(raw.numel())
        return append(file, raw)

    monkeypatch.setattr(HostFile, "append", counted)
    copy = copy_of(first=full(1))
    writes.clear()
    copy.add_bucket(BucketTable.of(entries), buffer)
    whole = kind in ("as buckets are", "behind a header")
    assert writes == ([30] if whole else [spec.nbytes for spec, _ in entries])
    assert all(
        stored.offset % stored.spec.torch_dtype.itemsize == 0 for stored in copy.tensors.values() if stored.spec.nbytes
    )
    buffer.fill_(0xFF)
    assert values(copy) == {"first": [1, 1, 1], "wide": [0, 1, 2], "half": [2, 2, 2], "empty": []}
    assert copy.nbytes == 12 + 30


def test_memory_is_given_back_with_the_last_holder() -> None:
    copy = copy_of(first=full(1))
    adopted = HostCopy.adopt(copy.describe())
    before = held()
    copy.files[0].close()
    copy.files[0].close()
    assert held() == before - 1
    assert values(adopted) == {"first": [1, 1, 1]}


def test_versions_move_up_one_place() -> None:
    kept = copies()
    kept.start_with("v0", copy_of(w=full(0)))
    commit(kept, 1, "v1", copy_of(w=full(1)))
    commit(kept, 2, "v2", copy_of(w=full(2)))
    assert kept.sizes() == {CopyRole.SERVED: ("v2", 12), CopyRole.PREVIOUS: ("v1", 12)}
    assert served(kept) == {"w": [2, 2, 2]}
    assert held() == 2


def test_nothing_is_kept_unless_asked_for() -> None:
    kept = copies(keep=False)
    kept.start_with("v0", copy_of(w=full(0)))
    commit(kept, 1, "v1", copy_of(w=full(1)))
    assert (kept.sizes(), held()) == ({}, 0)


def test_a_failed_update_leaves_the_copies_as_they_were() -> None:
    kept = copies()
    kept.start_with("v0", copy_of(w=full(0)))
    for committed in (0, 1):
        commit(kept, 1, "v1", copy_of(w=full(1)))
        kept.expect(2, "v2", copy_of(w=full(2)))
        kept.settle(1)  # A late call for the update before; this one still runs.
        assert kept.sizes()[CopyRole.SERVED][0] == "v1"
        if committed:
            kept.settle(2)
            assert kept.sizes()[CopyRole.SERVED][0] == "v2"
        else:
            kept.drop(1)
            kept.drop(2)
            kept.settle(2)
            assert kept.sizes()[CopyRole.SERVED][0] == "v1"


def test_a_rollback_takes_its_copy_along() -> None:
    kept = copies()
    kept.start_with("v0", copy_of(w=full(0)))
    commit(kept, 1, "v1", copy_of(w=full(1)))
    commit(kept, 2, "v1", None, restores=CopyRole.SERVED)
    assert {role: version for role, (version, _) in kept.sizes().items()} == {"served": "v1", "previous": "v0"}
    commit(kept, 3, "v0", None, restores=CopyRole.PREVIOUS)
    assert {role: version for role, (version, _) in kept.sizes().items()} == {"served": "v0"}
    assert served(kept) == {"w": [0, 0, 0]}
    with pytest.raises(WeightPushError, match="--keep-previous") as refused:
        kept.kept(CopyRole.PREVIOUS)
    assert refused.value.code is ErrorCode.NO_COPY
    assert str(refused.value) == str(no_copy(CopyRole.PREVIOUS))


def test_a_version_that_nobody_copied_has_no_copy() -> None:
    kept = copies()
    kept.start_with("v0", copy_of(w=full(0)))
    commit(kept, 1, "v1", None)
    assert {role: version for role, (version, _) in kept.sizes().items()} == {"previous": "v0"}


@pytest.mark.case("C57")
def test_a_partial_update_is_laid_over_what_was_served() -> None:
    kept = copies()
    kept.start_with("v0", copy_of(a=full(0), b=full(0), head=full(0)))
    commit(kept, 1, "v1", copy_of(b=full(1)), partial=True, optional={"head"})
    assert served(kept) == {
        "a": [0, 0, 0],
        "b": [1, 1, 1],
    }  # The head follows another tensor: it is not known any more.
    assert values(kept.kept(CopyRole.PREVIOUS)[1]) == {"a": [0, 0, 0], "b": [0, 0, 0], "head": [0, 0, 0]}
    assert kept.kept(CopyRole.SERVED)[1].digests == {"a": "digest of a [0.0]", "b": "digest of b [1.0]"}
    commit(kept, 2, "v2", copy_of(a=full(2), b=full(2)), partial=True)
    assert served(kept) == {"a": [2, 2, 2], "b": [2, 2, 2]}
    assert len(kept.kept(CopyRole.SERVED)[1].files) == 1


@pytest.mark.parametrize("base", [None, {"a": full(0)}])
def test_a_partial_update_without_a_base_has_no_copy(base: dict[str, torch.Tensor] | None) -> None:
    kept = copies()
    if base is not None:
        kept.start_with("v0", copy_of(**base))
    commit(kept, 1, "v1", copy_of(fused=full(1)), partial=True)
    assert CopyRole.SERVED not in kept.sizes()


def test_many_partial_updates_do_not_pile_up() -> None:
    names = [f"t{number}" for number in range(8)]
    kept = copies()
    kept.start_with("v0", copy_of(**{name: full(0, 4096) for name in names}))
    expected = dict.fromkeys(names, 0)
    for number in range(1, 40):
        # All but one, and always another one: every file keeps one tensor that is still served.
        left_out = names[number % len(names)]
        sent = {name: full(number, 4096) for name in names if name != left_out}
        commit(kept, number, f"v{number}", copy_of(**sent), partial=True)
        expected.update(dict.fromkeys(sent, number))
        assert {name: found[0] for name, found in served(kept).items()} == expected
        assert kept.nbytes <= 5 * 8 * 4096 * 4
    assert held() <= 6


@pytest.mark.parametrize("limit", [100, None])
def test_what_does_not_fit_is_refused_with_the_numbers(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: module._RESERVE_BYTES + 88)
    kept = copies(limit=limit)
    kept.start_with("v0", copy_of(w=full(0)))
    kept.check_room(88)
    with pytest.raises(WeightPushError) as refused:
        kept.check_room(89)
    assert refused.value.code is ErrorCode.STAGING_BUDGET_EXCEEDED
    assert refused.value.details == {"needed_bytes": 89, "kept_bytes": 12, "budget_bytes": 100}
    assert ("--staging-budget-mb)" in str(refused.value)) is (limit is not None)


def test_a_host_without_room_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    with pytest.raises(WeightPushError, match="the budget is 0 bytes"):
        copies().check_room(1)


@pytest.mark.parametrize("at_once", [700, 10_000])
def test_a_large_tensor_is_written_whole(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITE_BYTES", at_once)
    pwrite, file = os.pwrite, HostFile()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))  # As the kernel may.
    assert file.append(torch.arange(2500, dtype=torch.int16).view(torch.uint8)) == 0
    assert file.append(torch.ones(1, dtype=torch.uint8)) == 5056
    with open(file.path, "rb") as reader:
        assert reader.read(5000) == torch.arange(2500, dtype=torch.int16).numpy().tobytes()
    file.close()
