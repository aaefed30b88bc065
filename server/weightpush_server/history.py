"""How the last updates ended, for people. What decides anything about an update stands in the control record."""

from __future__ import annotations

import time
from typing import Final

from pydantic import BaseModel, Field

from weightpush_protocol.errors import ErrorDetail
from weightpush_protocol.messages import OutcomeError, UpdateKind, UpdateOutcome, utc_now
from weightpush_protocol.state import ServerState
from weightpush_server.records import FROM_DISK, EndedUpdate, UpdateRecord

#: How many ended updates are listed.
REMEMBERED: Final = 10
#: Characters of an error's message. The slot in the shared file has a fixed size, and strangers choose what it says.
_MESSAGE: Final = 500


class History(BaseModel):
    """The last updates that ended, the latest last."""

    outcomes: list[UpdateOutcome] = Field(default_factory=list)

    def with_outcome(self, outcome: UpdateOutcome) -> History:
        """Return this history with one more update in it; the oldest makes room."""
        return History(outcomes=[*self.outcomes, outcome][-REMEMBERED:])


def kind_of(update: UpdateRecord) -> UpdateKind:
    """Return where the tensors of ``update`` come from."""
    if update.undoes is not None:
        return UpdateKind.UNDO
    if update.restores is not None:
        return UpdateKind.ROLLBACK
    return UpdateKind.DISK if update.transport == FROM_DISK else UpdateKind.PUSH


def outcome_of(update: UpdateRecord, ended: EndedUpdate, state: ServerState) -> UpdateOutcome:
    """Return how ``update`` ended, which left the server in ``state``."""
    now = time.monotonic()
    answer, error = ended.answer, ended.error
    phases = dict(update.phase_seconds)
    if answer is None:  # Who commits books the last phase, who fails does not.
        phases[update.phase.value] = round(phases.get(update.phase.value, 0.0) + now - update.phase_since, 6)
    until_failed = now - update.gate_closed if update.gate_closed is not None else 0.0
    return UpdateOutcome(
        update_id=update.update_id,
        epoch=update.epoch,
        kind=kind_of(update),
        weight_version=update.weight_version,
        mode=update.mode,
        transport=update.transport,
        digest=update.digest,
        state=state,
        error=_in_short(error, update) if error is not None else None,
        tensors=update.tensors_total,
        bytes=update.bytes_total,
        seconds=answer.seconds if answer is not None else now - update.started,
        pause_seconds=answer.pause_seconds if answer is not None else until_failed,
        phase_seconds=phases,
        worker_seconds=update.worker_seconds,
        started_at=update.started_at,
        finished_at=utc_now(),
    )


def _in_short(error: ErrorDetail, update: UpdateRecord) -> OutcomeError:
    message = error.message if len(error.message) <= _MESSAGE else f"{error.message[:_MESSAGE]}..."
    return OutcomeError(code=error.code, message=message, phase=update.phase)
