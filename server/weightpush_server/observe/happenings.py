"""What happened to a server between two states of its control record. Pure: who changes the record need not tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from weightpush_protocol.errors import ErrorDetail
from weightpush_protocol.state import Phase, ServerState
from weightpush_server.records import ControlRecord, UpdateRecord


class Outcome(StrEnum):
    """How an update ended.

    ``committed``: its version is in force. ``untouched``: it ended before its first write, and the server is in the
    state of before. ``failed``: it ended after that, and the server serves nothing until the next one.
    """

    COMMITTED = "committed"
    UNTOUCHED = "untouched"
    FAILED = "failed"


@dataclass(frozen=True)
class StateChanged:
    """The server went from one state to another."""

    before: ServerState
    after: ServerState


@dataclass(frozen=True)
class UpdateBegan:
    """An update became the running one; nothing is checked yet."""

    update: UpdateRecord


@dataclass(frozen=True)
class PhaseEnded:
    """The running update left ``phase``, after ``seconds`` in it."""

    update: UpdateRecord
    phase: Phase
    seconds: float


@dataclass(frozen=True)
class UpdateEnded:
    """The running update is over. ``update`` is its record as it was last, ``state`` the server's state now.

    ``pause_seconds``: for how long its gate was closed so far; ``None`` if it never was.
    """

    update: UpdateRecord
    outcome: Outcome
    state: ServerState
    seconds: float
    pause_seconds: float | None
    phase_seconds: dict[str, float]
    worker_seconds: dict[str, float] = field(default_factory=dict)
    fingerprint: str | None = None
    error: ErrorDetail | None = None


Happening = StateChanged | UpdateBegan | PhaseEnded | UpdateEnded


def happenings(before: ControlRecord, after: ControlRecord, now: float) -> list[Happening]:
    """Return what happened from ``before`` to ``after``, in order; most changes of a record are no news.

    ``now``: ``time.monotonic``, when the change was made.
    """
    happened: list[Happening] = []
    ran, runs = before.update, after.update
    if ran is not None:
        if runs is not None and runs.epoch == ran.epoch:
            happened += _phases(ran, runs.phase_seconds)
        else:
            happened += _end(ran, after, now)
    if before.state is not after.state:
        happened.append(StateChanged(before.state, after.state))
    if runs is not None and (ran is None or ran.epoch != runs.epoch):
        happened.append(UpdateBegan(runs))
    return happened


def _phases(update: UpdateRecord, phase_seconds: dict[str, float]) -> list[PhaseEnded]:
    booked = update.phase_seconds
    return [
        PhaseEnded(update, Phase(phase), seconds - booked.get(phase, 0.0))
        for phase, seconds in phase_seconds.items()
        if booked.get(phase) != seconds
    ]


def _end(update: UpdateRecord, after: ControlRecord, now: float) -> list[Happening]:
    ended = after.find_ended(update.update_id)
    last = after.last_update
    if ended is None or ended.epoch != update.epoch:
        return []
    if ended.answer is not None and last is not None:
        paused = ended.answer.pause_seconds if update.gate_closed is not None else None
        end = UpdateEnded(
            update,
            Outcome.COMMITTED,
            after.state,
            ended.answer.seconds,
            paused,
            last.phase_seconds,
            last.worker_seconds,
            ended.answer.fingerprint,
        )
    else:
        spent = update.phase_seconds.get(update.phase.value, 0.0) + now - update.phase_since
        end = UpdateEnded(
            update,
            Outcome.FAILED if update.written else Outcome.UNTOUCHED,
            after.state,
            now - update.started,
            now - update.gate_closed if update.gate_closed is not None else None,
            {**update.phase_seconds, update.phase.value: round(spent, 6)},
            update.worker_seconds,
            error=ended.error,
        )
    return [*_phases(update, end.phase_seconds), end]
