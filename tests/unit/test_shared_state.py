from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from weightpush_protocol.messages import Deadlines, DigestKind, InFlight, UpdateMode
from weightpush_protocol.state import ServerState
from weightpush_server.records import ControlRecord, UpdateRecord, WorkerRecord
from weightpush_server.shared_state import SharedState


def make_update(**changes: object) -> UpdateRecord:
    fields: dict[str, object] = {
        "update_id": "u1",
        "epoch": 1,
        "request_digest": "d",
        "mode": UpdateMode.DIRECT,
        "origin": ServerState.SERVING,
        "weight_version": "v1",
        "transport": "gloo",
        "in_flight": InFlight.WAIT,
        "digest": DigestKind.WP64,
        "deadlines": Deadlines(),
        "tensors_total": 3,
        "bytes_total": 12,
        "buckets_total": 1,
    }
    return UpdateRecord.model_validate({**fields, **changes})


@pytest.fixture
def shared(tmp_path: Path) -> SharedState:
    control = ControlRecord(instance_id="i", weight_version="v0")
    return SharedState.create(tmp_path / "state", workers=2, control=control)


def test_the_file_is_private(shared: SharedState) -> None:
    assert os.stat(shared.path).st_mode & 0o777 == 0o600


def test_a_second_process_sees_every_change(shared: SharedState) -> None:
    other = SharedState(shared.path)
    before = other.sequence()
    with shared.transaction() as control:
        control.weight_version = "v1"
    assert other.sequence() != before
    assert other.control().weight_version == "v1"


def test_a_transaction_that_raises_changes_nothing(shared: SharedState) -> None:
    def change_and_raise() -> None:
        with shared.transaction() as control:
            control.weight_version = "v1"
            raise KeyError

    with pytest.raises(KeyError):
        change_and_raise()
    assert shared.control().weight_version == "v0"
    with shared.transaction() as control:  # The lock is free again.
        control.weight_version = "v2"
    assert shared.control().weight_version == "v2"


def _count(path: Path, times: int) -> None:
    state = SharedState(path)
    for _ in range(times):
        with state.transaction() as control:
            control.epoch += 1


def test_transactions_of_several_processes_lose_nothing(shared: SharedState) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(shared.path, 200)) for _ in range(3)]
    for process in processes:
        process.start()
    seen = 0
    while any(process.is_alive() for process in processes):
        epoch = shared.control().epoch  # Readers never see a torn record, and never an older one.
        assert epoch >= seen
        seen = epoch
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert shared.control().epoch == 600


def test_a_writer_killed_in_mid_write_does_not_block_the_next_one(shared: SharedState) -> None:
    slot = shared._control
    # What a writer leaves that dies before its last store: the other area full of half a record.
    start = slot._area_at(slot.sequence() + 1)
    shared._memory[start : start + 64] = b"\xff" * 64
    assert SharedState(shared.path).control().weight_version == "v0"
    with SharedState(shared.path).transaction() as control:
        control.weight_version = "v9"
    assert shared.control().weight_version == "v9"


def test_a_record_that_does_not_fit_is_refused(shared: SharedState) -> None:
    with pytest.raises(ValueError, match="does not fit"), shared.transaction() as control:
        control.weight_version = "v" * 300_000
    assert shared.control().weight_version == "v0"


def test_gate_counters_add_up_over_processes(shared: SharedState) -> None:
    first, second = shared.claim_counter(), SharedState(shared.path).claim_counter()
    assert first != second
    shared.set_in_flight(first, 2)
    shared.set_in_flight(second, 3)
    assert shared.in_flight() == 5
    shared.set_in_flight(second, 0)
    assert shared.in_flight() == 2


def _flip(path: Path, index: int, times: int) -> None:
    state = SharedState(path)
    for number in range(times):
        state.set_in_flight(index, 1 + number % 2)


def test_a_counter_is_never_seen_empty_while_it_is_written(shared: SharedState) -> None:
    index = shared.claim_counter()
    shared.set_in_flight(index, 1)
    process = multiprocessing.get_context("fork").Process(target=_flip, args=(shared.path, index, 50_000))
    process.start()
    while process.is_alive():
        assert shared.in_flight() > 0  # A zero here would let an update start under a running request.
    process.join()
    assert process.exitcode == 0


def test_workers_report_in_rank_order(shared: SharedState) -> None:
    assert shared.worker_records() == []
    for rank in (1, 0):
        shared.write_worker(WorkerRecord(rank=rank, pid=7, device="cpu", weight_version="v0"))
    assert [worker.rank for worker in SharedState(shared.path).worker_records()] == [0, 1]


def test_another_file_is_not_taken_for_a_state(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="no weightpush state"):
        SharedState(path)
