from __future__ import annotations

import pytest

from unit.test_shared_state import make_update
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import InFlight, UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_server.public_status import build_status
from weightpush_server.records import ControlRecord, UpdateRecord, WorkerRecord


def running(state: ServerState = ServerState.SERVING, **changes: object) -> ControlRecord:
    control = ControlRecord(instance_id="i", weight_version="v0", state=state, epoch=1)
    control.update = make_update(origin=state, **changes)
    return control


def error(code: ErrorCode = ErrorCode.LANDING_FAILED) -> WeightPushError:
    return WeightPushError(code, "it broke", details={"tensor": "w"})


@pytest.mark.parametrize("origin", [ServerState.SERVING, ServerState.FAILED, ServerState.AWAITING_WEIGHTS])
@pytest.mark.case("C3", "C4")
def test_a_failure_before_the_first_write_goes_back_to_where_it_came_from(origin: ServerState) -> None:
    for gate_closed in (False, True):
        control = running(origin)
        if gate_closed:
            control.close_gate()
            assert not control.gate_open
        control.fail(error())
        assert control.state is origin
        assert control.update is None
        assert control.last_error is not None
        assert control.last_error.code is ErrorCode.LANDING_FAILED


@pytest.mark.parametrize("origin", [ServerState.SERVING, ServerState.FAILED, ServerState.AWAITING_WEIGHTS])
@pytest.mark.case("C3")
def test_a_failure_after_the_first_write_is_failed(origin: ServerState) -> None:
    control = running(origin)
    control.fingerprint = "f"
    control.close_gate()
    assert control.update is not None
    control.update.written = True
    control.fail(error())
    assert control.state is ServerState.FAILED
    assert not control.gate_open
    assert control.weight_version == "v0"
    assert control.fingerprint is None


@pytest.mark.case("C6")
def test_a_commit_publishes_and_clears_the_last_error() -> None:
    control = running(ServerState.FAILED)
    control.close_gate()
    assert not control.gate_open
    answer = control.commit(fingerprint="f")
    assert (control.weight_version, control.previous_version) == ("v1", "v0")
    assert control.state is ServerState.SERVING
    assert control.last_error is None
    assert answer.weight_version == "v1"
    assert control.last_update is not None
    assert control.last_update.bytes == 12
    assert control.kept == []


def test_what_a_server_was_started_on_but_never_served_is_no_previous_version() -> None:
    control = ControlRecord(instance_id="i", weight_version="v0", state=ServerState.AWAITING_WEIGHTS, has_served=False)
    control.update = make_update(origin=control.state)
    control.close_gate()
    control.update.written = True
    control.fail(WeightPushError(ErrorCode.LEASE_LOST, "gone"))
    for version, previous in (("v1", None), ("v2", "v1")):
        control.update = make_update(origin=control.state, weight_version=version, update_id=version)
        control.close_gate()
        control.commit(fingerprint="f")
        assert control.previous_version == previous


def test_only_kept_requests_span_versions() -> None:
    for in_flight, label in ((InFlight.KEEP, "v0, v1"), (InFlight.WAIT, "v0")):
        control = running(in_flight=in_flight)
        control.close_gate()
        assert control.update is not None
        assert control.label(entered_epoch=0, entered_version="v0") == "v0"
        control.update.enter(Phase.PUBLISHING)
        assert control.label(entered_epoch=0, entered_version="v0") == label
        control.commit(fingerprint="f")
        assert control.label(entered_epoch=0, entered_version="v0") == label
        assert control.committed_epoch == 1
        assert control.label(entered_epoch=1, entered_version="v1") == "v1"


def test_a_request_kept_across_several_updates_names_all_versions_in_turn() -> None:
    control = ControlRecord(instance_id="i", weight_version="v0")
    wanted = ["v0"]
    for version in ("v1", "v2", "v2", "v0"):
        control.epoch += 1
        control.update = make_update(
            update_id=f"u{control.epoch}", epoch=control.epoch, weight_version=version, in_flight=InFlight.KEEP
        )
        control.close_gate()
        control.commit(fingerprint="f")
        wanted += [version] if wanted[-1] != version else []
        assert control.label(entered_epoch=0, entered_version="v0") == ", ".join(wanted)
    assert control.label(entered_epoch=3, entered_version="v2") == "v2, v0"
    assert control.label(entered_epoch=4, entered_version="v0") == "v0"


def test_an_update_lost_while_publishing_keeps_the_old_version() -> None:
    control = running(in_flight=InFlight.KEEP)
    control.close_gate()
    assert control.update is not None
    control.update.written = True
    control.update.enter(Phase.PUBLISHING)
    control.fail(error())
    assert (control.state, control.weight_version, control.kept) == (ServerState.FAILED, "v0", [])


def test_the_lease_runs_only_while_the_next_step_is_the_trainers() -> None:
    update = make_update()
    assert not update.awaits_trainer  # It is being checked.
    update.enter(Phase.RECEIVING)
    assert update.awaits_trainer
    update.preparing = True
    assert not update.awaits_trainer
    with pytest.raises(WeightPushError, match="came while the update was receiving"):
        update.take_bucket(0, None, as_body=update.transport == "http")
    update.enter(Phase.CLOSING)
    assert not update.awaits_trainer
    update.enter(Phase.PREPARED)
    assert update.awaits_trainer
    update.finishing = True
    assert not update.awaits_trainer
    update = make_update()
    update.enter(Phase.RECEIVING)
    update.finishing = True
    assert not update.awaits_trainer


@pytest.mark.case("C6", "C46")
def test_calls_of_other_updates_are_fenced_off() -> None:
    control = running()
    assert control.active("u1", 1).epoch == 1
    with pytest.raises(WeightPushError) as stale:
        control.active("u0")
    assert stale.value.code is ErrorCode.STALE_UPDATE
    assert stale.value.details == {"running": "u1"}
    with pytest.raises(WeightPushError, match="epoch is 1, not 7"):
        control.active("u1", 7)
    control.fail(error())
    with pytest.raises(WeightPushError) as failed:
        control.active("u1")
    assert failed.value.code is ErrorCode.UPDATE_FAILED
    assert failed.value.details["cause"]["details"]["tensor"] == "w"


def test_nobody_goes_on_with_an_update_that_is_being_given_up() -> None:
    control = running()
    assert control.update is not None
    control.update.failure = error().body().error
    with pytest.raises(WeightPushError) as failed:
        control.active("u1")
    assert failed.value.code is ErrorCode.UPDATE_FAILED


def test_a_failed_repair_keeps_the_reason_of_before() -> None:
    control = running()
    control.close_gate()
    assert control.update is not None
    control.update.written = True
    control.fail(error())
    control.update = make_update(update_id="u2", origin=ServerState.FAILED)
    control.fail(error(ErrorCode.MANIFEST_REJECTED))
    assert control.last_error is not None
    assert control.last_error.code is ErrorCode.MANIFEST_REJECTED
    assert control.last_error.details["failed_before"]["update_id"] == "u1"


def test_few_ended_updates_are_remembered_and_phases_are_timed() -> None:
    control = running()
    for number in range(30):
        control.update = make_update(update_id=f"u{number}")
        control.update.enter(Phase.RENDEZVOUS)
        assert set(control.update.phase_seconds) == {"checking"}
        control.fail(error())
    assert len(control.ended) == 8
    assert control.find_ended("u29") is not None
    assert control.find_ended("u0") is None


def test_progress_is_that_of_the_slowest_worker() -> None:
    control = running()
    workers = [
        WorkerRecord(rank=rank, pid=1, device="cpu", weight_version="v0", epoch=1, buckets_done=done, bytes_done=done)
        for rank, done in ((0, 3), (1, 2))
    ]
    workers.append(WorkerRecord(rank=2, pid=1, device="cpu", weight_version="v0", epoch=0))
    status = build_status(control, workers)
    assert status.update is not None
    assert status.update.buckets_done == 2
    assert status.serving
    assert [worker.rank for worker in status.workers] == [0, 1, 2]


def test_staging_serves_until_the_weights_land() -> None:
    control = running(mode=UpdateMode.STAGED)
    control.stage()
    assert (control.state, control.gate_open) == (ServerState.STAGING, True)
    control.close_gate()
    assert (control.state, control.gate_open) == (ServerState.UPDATING, False)
    control.commit(fingerprint="f")
    assert (control.state, control.weight_version) == (ServerState.SERVING, "v1")


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.case("C96")
def test_a_staged_update_that_fails_before_its_first_write_leaves_no_trace(draining: bool) -> None:
    control = running(mode=UpdateMode.STAGED)
    control.fingerprint = "f"
    control.stage()
    if draining:
        control.close_gate()
    failed = control.fail(error())
    assert (control.state, control.weight_version, control.fingerprint) == (ServerState.SERVING, "v0", "f")
    assert control.begin_undoing(failed, SERVED) is None
    assert control.update is None


SERVED = CopyStatus(role=CopyRole.SERVED, weight_version="v0", bytes=3)


def test_a_staged_update_that_spoils_the_weights_is_undone_and_stays_the_last_error() -> None:
    control = running(mode=UpdateMode.STAGED)
    control.previous_version = "older"
    control.stage()
    control.close_gate()
    assert control.update is not None
    control.update.written = True
    failed = control.fail(error())
    undo = control.begin_undoing(failed, SERVED)
    assert undo is not None
    assert control.update is undo
    assert (undo.epoch, undo.undoes, undo.restores) == (2, "u1", CopyRole.SERVED)
    assert not control.gate_open
    with pytest.raises(WeightPushError) as busy:
        control.reserve("u2", "d", lambda _: make_update(update_id="u2"))
    assert busy.value.code is ErrorCode.UPDATE_IN_PROGRESS
    control.close_gate()
    control.commit(fingerprint="f")
    assert (control.state, control.weight_version, control.previous_version) == (ServerState.SERVING, "v0", "older")
    assert control.last_error is not None
    assert control.last_error.update_id == "u1"


def test_an_undoing_that_fails_tells_both_reasons_and_is_not_repeated() -> None:
    control = running(mode=UpdateMode.STAGED)
    control.stage()
    control.close_gate()
    assert control.update is not None
    control.update.written = True
    assert control.begin_undoing(control.fail(error()), SERVED) is not None
    control.close_gate()
    assert control.update.undoes == "u1"
    control.update.written = True
    failed = control.fail(error(ErrorCode.PROOF_FAILED))
    assert control.begin_undoing(failed, SERVED) is None
    assert control.state is ServerState.FAILED
    assert control.last_error is not None
    assert control.last_error.code is ErrorCode.PROOF_FAILED
    assert control.last_error.details["failed_before"]["update_id"] == "u1"


def test_direct_updates_are_not_undone_unasked() -> None:
    control = running()
    control.close_gate()
    assert control.update is not None
    control.update.written = True
    assert control.begin_undoing(control.fail(error()), SERVED) is None


@pytest.mark.parametrize(
    ("role", "origin", "previous"),
    [(CopyRole.SERVED, ServerState.FAILED, "older"), (CopyRole.PREVIOUS, ServerState.SERVING, None)],
)
def test_a_rollback_says_what_is_known_of_before(role: CopyRole, origin: ServerState, previous: str | None) -> None:
    control = running(origin, restores=role)
    control.previous_version = "older"
    control.close_gate()
    control.commit(fingerprint="f")
    assert (control.weight_version, control.previous_version) == ("v1", previous)


def test_an_update_is_reserved_once_and_what_its_maker_raises_changes_nothing() -> None:
    control = ControlRecord(instance_id="i", weight_version="v0")

    def make(record: ControlRecord) -> UpdateRecord:
        return make_update(epoch=record.epoch, request_digest="d")

    mine, update = control.reserve("u1", "d", make)
    assert (mine, update.epoch, control.epoch) == (True, 1, 1)
    assert control.reserve("u1", "d", make) == (False, update)
    with pytest.raises(WeightPushError) as other:
        control.reserve("u1", "another body", make)
    assert other.value.code is ErrorCode.UPDATE_IN_PROGRESS
    control.fail(error())
    with pytest.raises(WeightPushError) as ended:
        control.reserve("u1", "d", make)
    assert ended.value.code is ErrorCode.UPDATE_FAILED


def test_an_update_that_was_aborted_before_its_begin_arrived_does_not_begin() -> None:
    control = ControlRecord(instance_id="i", weight_version="v0")

    def begin(update_id: str) -> bool:
        return control.reserve(update_id, "d", lambda _: make_update(update_id=update_id, request_digest="d"))[0]

    control.abort_ahead("u1")
    for _ in range(2):  # A repeated begin is refused as well.
        with pytest.raises(WeightPushError, match="aborted before its begin arrived") as aborted:
            begin("u1")
        assert (aborted.value.code, aborted.value.update_id) == (ErrorCode.ABORTED, "u1")
    assert (control.update, control.epoch, control.last_error) == (None, 0, None)
    with pytest.raises(WeightPushError) as stale:
        control.active("u1")
    assert stale.value.code is ErrorCode.STALE_UPDATE
    assert begin("u2")


def test_only_updates_that_are_not_known_are_aborted_ahead() -> None:
    control = running()
    control.abort_ahead("u1")
    control.fail(error())
    control.abort_ahead("u1")
    assert control.aborted_ahead == []


def test_few_updates_are_remembered_as_aborted_ahead() -> None:
    control = ControlRecord(instance_id="i", weight_version="v0")
    for number in range(100):
        control.abort_ahead(f"u{number}")
        control.abort_ahead("again")
    assert control.aborted_ahead == [*(f"u{number}" for number in range(69, 100)), "again"]
    control.reserve("u0", "d", lambda _: make_update(update_id="u0"))
    assert control.update is not None
