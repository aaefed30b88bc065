from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unit.test_shared_state import make_update
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus, HistoryAnswer, UpdateKind
from weightpush_server.history import REMEMBERED
from weightpush_server.records import FROM_COPY, FROM_DISK, ControlRecord
from weightpush_server.shared_state import SharedState


@pytest.fixture
def shared(tmp_path: Path) -> SharedState:
    control = ControlRecord(instance_id="i", weight_version="v0")
    return SharedState.create(tmp_path / "state", workers=1, control=control)


def begin(shared: SharedState, **changes: object) -> None:
    with shared.transaction() as control:
        update_id = f"u{control.epoch + 1}"
        control.reserve(
            update_id,
            "d",
            lambda record: make_update(
                **{"update_id": update_id, "epoch": record.epoch, "origin": record.state, **changes}
            ),
        )
        control.close_gate()


def enter(shared: SharedState, phase: Phase, *, written: bool = True) -> None:
    with shared.transaction() as control:
        assert control.update is not None
        control.update.enter(phase)
        control.update.written = written


def commit(shared: SharedState) -> None:
    with shared.transaction() as control:
        control.commit(fingerprint="f")


def fail(shared: SharedState, message: str = "why", code: ErrorCode = ErrorCode.ABORTED) -> None:
    with shared.transaction() as control:
        control.fail(WeightPushError(code, message))


def test_a_commit_is_remembered_as_the_status_has_it(shared: SharedState) -> None:
    begin(shared, weight_version="v1")
    enter(shared, Phase.CLOSING)
    time.sleep(0.01)
    enter(shared, Phase.PUBLISHING)
    commit(shared)
    (outcome,) = shared.history().outcomes
    last = shared.control().last_update
    assert last is not None
    for name in ("update_id", "weight_version", "mode", "transport", "tensors", "bytes", "phase_seconds"):
        assert getattr(outcome, name) == getattr(last, name), name
    assert outcome.seconds == pytest.approx(last.seconds, abs=1e-6)
    assert outcome.pause_seconds == pytest.approx(last.pause_seconds, abs=1e-6)
    assert outcome.phase_seconds["closing"] >= 0.01
    assert (outcome.error, outcome.state, outcome.kind) == (None, ServerState.SERVING, UpdateKind.PUSH)
    assert outcome.finished_at >= outcome.started_at


@pytest.mark.parametrize("written", [True, False])
def test_a_failure_says_where_and_how_it_left_the_server(shared: SharedState, written: bool) -> None:
    begin(shared, weight_version="v1")
    enter(shared, Phase.RECEIVING, written=written)
    time.sleep(0.02)
    fail(shared, "the trainer died", ErrorCode.LEASE_LOST)
    (outcome,) = shared.history().outcomes
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == (ErrorCode.LEASE_LOST, "the trainer died")
    assert outcome.error.phase is Phase.RECEIVING
    assert outcome.state is (ServerState.FAILED if written else ServerState.SERVING)
    # The phase in which it failed is counted, though nobody left it.
    assert outcome.phase_seconds["receiving"] >= 0.02
    assert outcome.seconds >= outcome.pause_seconds >= 0.02


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, UpdateKind.PUSH),
        ({"transport": FROM_DISK}, UpdateKind.DISK),
        ({"transport": FROM_COPY, "restores": CopyRole.PREVIOUS}, UpdateKind.ROLLBACK),
    ],
)
def test_kinds_of_updates_are_told_apart(shared: SharedState, changes: dict[str, object], kind: UpdateKind) -> None:
    begin(shared, **changes)
    commit(shared)
    assert [outcome.kind for outcome in shared.history().outcomes] == [kind]


def test_going_back_by_itself_follows_the_failure_it_undoes(shared: SharedState) -> None:
    with shared.transaction() as control:
        control.reserve("u1", "d", lambda record: make_update(mode=UpdateMode.STAGED, weight_version="v1"))
        control.stage()
    with shared.transaction() as control:
        control.close_gate()
    enter(shared, Phase.CLOSING)
    with shared.transaction() as control:
        failed = control.update
        assert failed is not None
        control.fail(WeightPushError(ErrorCode.POSTLOAD_FAILED, "broken"))
        assert control.begin_undoing(failed, CopyStatus(role=CopyRole.SERVED, weight_version="v0", bytes=1))
        control.close_gate()
    assert [outcome.update_id for outcome in shared.history().outcomes] == ["u1"]
    commit(shared)
    assert [outcome.kind for outcome in shared.history().outcomes] == [UpdateKind.PUSH, UpdateKind.UNDO]
    assert shared.history().outcomes[-1].state is ServerState.SERVING


def test_the_last_ten_are_kept_by_whichever_process_ends_them(shared: SharedState) -> None:
    other = SharedState(shared.path)
    for number in range(REMEMBERED + 5):
        process = (shared, other)[number % 2]
        begin(process, weight_version=f"v{number}")
        commit(process)
    versions = [f"v{number}" for number in range(5, REMEMBERED + 5)]
    for process in (shared, other):
        assert [outcome.weight_version for outcome in process.history().outcomes] == versions


def test_a_change_that_ends_nothing_leaves_it_alone(shared: SharedState) -> None:
    begin(shared)
    commit(shared)
    before = shared._history.sequence()
    begin(shared)
    enter(shared, Phase.RECEIVING)
    assert shared._history.sequence() == before


@pytest.mark.parametrize("letter", ["x", "\x01", "\N{PILE OF POO}", '"'])
def test_whatever_strangers_say_fits(shared: SharedState, letter: str) -> None:
    for _ in range(REMEMBERED + 1):
        begin(shared, weight_version="v" * 128)
        for phase in Phase:
            enter(shared, phase)
        with shared.transaction() as control:
            assert control.update is not None
            control.update.worker_seconds = {f"part{number}": 1234.567891 for number in range(16)}
        fail(shared, letter * 100_000)
    outcomes = shared.history().outcomes
    assert len(outcomes) == REMEMBERED
    assert all(outcome.error is not None and outcome.error.message.startswith(letter) for outcome in outcomes)
    assert len(HistoryAnswer(instance_id="i", updates=outcomes).model_dump_json()) < shared._history.capacity


def test_an_error_message_is_cut(shared: SharedState) -> None:
    begin(shared)
    fail(shared, "m" * 501)
    error = shared.history().outcomes[0].error
    assert error is not None
    assert error.message == "m" * 500 + "..."


@pytest.mark.parametrize("end", [commit, fail])
def test_a_server_that_never_updated_has_none(shared: SharedState, end: Callable[[SharedState], None]) -> None:
    assert shared.history().outcomes == []
    begin(shared)
    assert shared.history().outcomes == []
    end(shared)
    assert len(shared.history().outcomes) == 1
