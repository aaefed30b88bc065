from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unit.test_shared_state import make_update
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_server.observe import lines
from weightpush_server.observe.happenings import (
    Happening,
    Outcome,
    PhaseEnded,
    StateChanged,
    UpdateBegan,
    UpdateEnded,
    happenings,
)
from weightpush_server.records import ControlRecord, UpdateRecord
from weightpush_server.shared_state import SharedState

Change = Callable[[ControlRecord], object]


class Server:
    """A control record that changes as in a server, and what is found to have happened in each change."""

    def __init__(self, **control: Any) -> None:
        self.record = ControlRecord(instance_id="i", weight_version="v0", **control)
        self.now = 0.0

    def change(self, work: Change) -> list[Happening]:
        before = self.record
        self.record = before.model_copy(deep=True)
        work(self.record)
        self.now = time.monotonic()
        return happenings(before, self.record, self.now)

    def begin(self, **update: Any) -> list[Happening]:
        def reserve(control: ControlRecord) -> None:
            update.setdefault("update_id", f"u{control.epoch + 1}")
            control.reserve(
                update["update_id"],
                "d",
                lambda now: make_update(**{"epoch": now.epoch, "origin": now.state, **update}),
            )

        return self.change(reserve)

    def enter(self, phase: Phase) -> list[Happening]:
        return self.change(lambda control: self.running(control).enter(phase))

    def fail(self, code: ErrorCode, *, written: bool = False) -> list[Happening]:
        if written:
            self.change(lambda control: setattr(self.running(control), "written", True))
        return self.change(lambda control: control.fail(WeightPushError(code, "it broke")))

    @staticmethod
    def running(control: ControlRecord) -> UpdateRecord:
        assert control.update is not None
        return control.update


def kinds(happened: list[Happening]) -> list[type[Happening]]:
    return [type(happening) for happening in happened]


def test_a_committed_update_from_its_begin_to_its_end() -> None:
    server = Server()
    (began,) = server.begin()
    assert isinstance(began, UpdateBegan)
    assert began.update.update_id == "u1"
    for phase, left in ((Phase.RENDEZVOUS, Phase.CHECKING), (Phase.DRAINING, Phase.RENDEZVOUS)):
        (ended,) = server.enter(phase)
        assert isinstance(ended, PhaseEnded)
        assert ended.phase is left
        assert ended.seconds == server.record.update.phase_seconds[left.value]  # type: ignore[union-attr] # it runs
    assert server.change(lambda control: control.close_gate()) == [
        StateChanged(ServerState.SERVING, ServerState.UPDATING)
    ]
    happened = server.change(lambda control: control.commit(fingerprint="f"))
    assert kinds(happened) == [PhaseEnded, UpdateEnded, StateChanged]
    last, end, _ = happened
    assert isinstance(last, PhaseEnded)
    assert last.phase is Phase.DRAINING
    assert isinstance(end, UpdateEnded)
    assert (end.outcome, end.state, end.fingerprint) == (Outcome.COMMITTED, ServerState.SERVING, "f")
    assert list(end.phase_seconds) == ["checking", "rendezvous", "draining"]
    assert end.pause_seconds is not None
    assert 0 <= end.pause_seconds <= end.seconds


def test_what_changes_all_the_time_is_no_news() -> None:
    server = Server()
    server.begin()
    server.enter(Phase.RECEIVING)

    def renew(control: ControlRecord) -> None:
        update = server.running(control)
        update.lease_renewed = time.monotonic()
        update.take_bucket(0, None, as_body=False)
        update.preparing = True

    assert server.change(renew) == []
    assert server.change(lambda control: control.abort_ahead("other")) == []
    assert server.change(lambda control: setattr(control, "fingerprint", "f")) == []
    assert server.change(lambda control: setattr(server.running(control), "written", True)) == []


@pytest.mark.parametrize("written", [False, True])
def test_a_failure_says_whether_anything_was_written(written: bool) -> None:
    server = Server()
    server.begin(mode=UpdateMode.STAGED)
    server.enter(Phase.RECEIVING)
    server.change(lambda control: control.stage())
    if written:
        server.change(lambda control: control.close_gate())
    last, end, changed = server.fail(ErrorCode.LEASE_LOST, written=written)
    assert isinstance(last, PhaseEnded)
    assert last.phase is Phase.RECEIVING
    assert isinstance(end, UpdateEnded)
    assert end.error is not None
    assert end.error.code is ErrorCode.LEASE_LOST
    assert end.outcome is (Outcome.FAILED if written else Outcome.UNTOUCHED)
    assert end.state is (ServerState.FAILED if written else ServerState.SERVING)
    assert (end.pause_seconds is None) is not written
    assert list(end.phase_seconds) == ["checking", "receiving"]
    assert isinstance(changed, StateChanged)


def test_an_update_that_could_not_repair_a_failed_server_left_it_untouched() -> None:
    server = Server(state=ServerState.FAILED)
    server.begin()
    happened = server.fail(ErrorCode.MANIFEST_REJECTED)
    assert kinds(happened) == [PhaseEnded, UpdateEnded]
    end = happened[1]
    assert isinstance(end, UpdateEnded)
    assert (end.outcome, end.state, end.pause_seconds) == (Outcome.UNTOUCHED, ServerState.FAILED, None)


def test_an_undoing_begins_where_the_failure_ends() -> None:
    server = Server()
    server.begin(mode=UpdateMode.STAGED)
    server.change(lambda control: control.stage())
    server.change(lambda control: control.close_gate())
    server.change(lambda control: setattr(server.running(control), "written", True))

    def fail(control: ControlRecord) -> None:
        update = server.running(control)
        control.fail(WeightPushError(ErrorCode.PROOF_FAILED, "it broke"))
        control.begin_undoing(update, CopyStatus(role=CopyRole.SERVED, weight_version="v0", bytes=12))

    happened = server.change(fail)
    assert kinds(happened) == [PhaseEnded, UpdateEnded, StateChanged, UpdateBegan]
    assert isinstance(happened[3], UpdateBegan)
    assert happened[3].update.undoes == "u1"


def test_an_id_that_comes_again_is_another_update() -> None:
    """Ids are forgotten some updates later: what counts is the epoch."""
    server = Server()
    server.begin(update_id="same")
    server.fail(ErrorCode.ABORTED)
    server.record.ended.clear()
    server.begin(update_id="same")
    _, end = server.fail(ErrorCode.LEASE_LOST)
    assert isinstance(end, UpdateEnded)
    assert end.update.epoch == 2
    assert end.error is not None
    assert end.error.code is ErrorCode.LEASE_LOST


# Lines


def test_each_phase_is_one_line_with_the_id_of_its_update(server_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    happened = server.begin() + server.enter(Phase.DRAINING) + server.change(lambda control: control.close_gate())
    happened += server.change(lambda control: control.commit(fingerprint="f"))
    for happening in happened:
        lines.write(happening)
    events = [record.message.split()[0] for record in server_log.records]
    assert events == [
        *("event=weightpush.update_began", "event=weightpush.update_phase"),
        *("event=weightpush.update_phase", "event=weightpush.update_committed"),
    ]
    assert all(" update_id=u1 " in record.message for record in server_log.records)
    assert all(record.weightpush["update_id"] == "u1" for record in server_log.records)
    assert "phase=checking seconds=" in server_log.records[1].message
    assert (
        "weight_version=v1 mode=direct transport=gloo in_flight=wait tensors=3 bytes=12"
        in server_log.records[0].message
    )


def test_a_failure_is_a_warning_with_code_and_reason() -> None:
    server = Server()
    server.begin()
    end = server.fail(ErrorCode.DIGEST_MISMATCH)[1]
    found = lines.line(end)
    assert found is not None
    level, fields = found
    assert level == logging.WARNING
    text = lines.logfmt(fields)
    assert 'outcome=untouched phase=checking code=digest_mismatch reason="it broke" seconds=' in text
    assert text.endswith("state=serving")


@pytest.mark.case("C50")
def test_no_value_begins_a_line_or_a_field_of_its_own() -> None:
    fields = {
        "plain": "a-b/c.d:e",
        "nothing": None,
        "empty": "",
        "spaced": "a b",
        "forged": "x\nevent=weightpush.update_committed",
        "quoted": 'say "it"',
        "colour": "\x1b[31mred",
        "foreign": "größe\u2028",
        "seconds": 0.000123,
        "count": 3,
    }
    text = lines.logfmt(fields)
    assert text.isascii()
    assert text.isprintable()
    assert text == (
        'plain=a-b/c.d:e empty="" spaced="a b" forged="x\\nevent=weightpush.update_committed" quoted="say \\"it\\"" '
        'colour="\\u001b[31mred" foreign="gr\\u00f6\\u00dfe\\u2028" seconds=0.000123 count=3'
    )


# Who is told


def test_the_listener_hears_of_it_when_the_lock_is_free_and_only_of_news(tmp_path: Path) -> None:
    shared = SharedState.create(
        tmp_path / "state", workers=1, control=ControlRecord(instance_id="i", weight_version="v0")
    )
    heard: list[Happening] = []

    def listen(happened: list[Happening]) -> None:
        with shared.transaction():  # Would wait for ever under the lock.
            heard.extend(happened)

    shared.listener = listen
    with shared.transaction() as control:
        control.fingerprint = "f"
    assert heard == []
    with shared.transaction() as control:
        control.reserve("u1", "d", lambda now: make_update(epoch=now.epoch))
    assert kinds(heard) == [UpdateBegan]

    def fail_in_it() -> None:
        with shared.transaction() as control:
            control.close_gate()
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_it()
    assert kinds(heard) == [UpdateBegan]


def test_watching_never_fails_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_log: pytest.LogCaptureFixture
) -> None:
    from weightpush_server.observe.listener import Listener

    shared = SharedState.create(
        tmp_path / "state", workers=1, control=ControlRecord(instance_id="i", weight_version="v0")
    )
    shared.listener = Listener()

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(lines, "write", broken)
    with shared.transaction() as control:
        control.reserve("u1", "d", lambda now: make_update(epoch=now.epoch))
    monkeypatch.setattr("weightpush_server.shared_state.happenings", broken)
    with shared.transaction() as control:
        control.close_gate()
    assert shared.control().state is ServerState.UPDATING
    assert [record.message for record in server_log.records] == [
        "what happened could not be logged",
        "what happened could not be counted",
    ]
