"""How the last updates ended, for people. What decides anything about an update stands in the control record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, Field

from weightpush_protocol.errors import ErrorDetail
from weightpush_protocol.messages import utc_now
from weightpush_protocol.status import OutcomeError, UpdateKind, UpdateOutcome
from weightpush_server.observe.happenings import Happening, UpdateEnded
from weightpush_server.records import FROM_DISK, UpdateRecord

#: How many ended updates are listed.
REMEMBERED: Final = 10
#: Characters of an error's message. The slot in the shared file has a fixed size, and strangers choose what it says.
_MESSAGE: Final = 500


class History(BaseModel):
    """The last updates that ended, the latest last."""

    outcomes: list[UpdateOutcome] = Field(default_factory=list)

    def after(self, happened: Sequence[Happening]) -> History:
        """Return this history with the updates in it that ``happened`` ended, or itself if there are none."""
        ended = [outcome_of(happening) for happening in happened if isinstance(happening, UpdateEnded)]
        return History(outcomes=[*self.outcomes, *ended][-REMEMBERED:]) if ended else self


def kind_of(update: UpdateRecord) -> UpdateKind:
    """Return where the tensors of ``update`` come from."""
    if update.undoes is not None:
        return UpdateKind.UNDO
    if update.restores is not None:
        return UpdateKind.ROLLBACK
    return UpdateKind.DISK if update.transport == FROM_DISK else UpdateKind.PUSH


def outcome_of(end: UpdateEnded) -> UpdateOutcome:
    """Return the end of an update as clients read it."""
    update = end.update
    return UpdateOutcome(
        update_id=update.update_id,
        epoch=update.epoch,
        kind=kind_of(update),
        weight_version=update.weight_version,
        mode=update.mode,
        transport=update.transport,
        digest=update.digest,
        state=end.state,
        error=_in_short(end.error, update) if end.error is not None else None,
        tensors=update.tensors_total,
        bytes=update.bytes_total,
        seconds=round(end.seconds, 6),
        pause_seconds=round(end.pause_seconds or 0.0, 6),
        phase_seconds=end.phase_seconds,
        worker_seconds=end.worker_seconds,
        started_at=update.started_at,
        finished_at=utc_now(),
    )


def _in_short(error: ErrorDetail, update: UpdateRecord) -> OutcomeError:
    message = error.message if len(error.message) <= _MESSAGE else f"{error.message[:_MESSAGE]}..."
    return OutcomeError(code=error.code, message=message, phase=update.phase)
