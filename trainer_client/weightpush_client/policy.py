"""What becomes of a push when a server fails, and whose failure it was. Decisions only: nothing here asks anybody.

A push over one data plane fails everywhere when one server dies: the others report that *they* lost their connections.
So whoever reports such a consequence is no culprit as long as there is a better explanation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.status import Status


class OnServerFailure(StrEnum):
    """What a push does when one of several servers fails.

    ``abort``: it fails, and nobody commits. ``exclude``: the others commit, and the report lists the one that failed.
    """

    ABORT = "abort"
    EXCLUDE = "exclude"


#: What a server reports when the trainer or another server went away.
CONSEQUENCES: Final = frozenset(
    {
        ErrorCode.TRANSPORT_FAILED,
        ErrorCode.RENDEZVOUS_FAILED,
        ErrorCode.ABORTED,
        ErrorCode.UPDATE_FAILED,
    }
)
#: Key in an error's details: addresses of the servers whose workers a data plane lost, or never had.
LOST_SERVERS: Final = "lost_servers"


@dataclass(frozen=True, slots=True)
class Witness:
    """What the server at ``url`` says of itself after a failure; ``instance_id`` is that of when the push began."""

    url: str
    instance_id: str
    answer: Status | Exception


def lost_by_silence(error: WeightPushError, update_id: str, witnesses: Sequence[Witness]) -> bool:
    """Whether a server lost its lease in update ``update_id``, which ended with ``error``."""
    last = (witness.answer.last_error for witness in witnesses if isinstance(witness.answer, Status))
    return error.code is ErrorCode.LEASE_LOST or any(
        own is not None and (own.code, own.update_id) == (ErrorCode.LEASE_LOST, update_id) for own in last
    )


def culprits(error: WeightPushError, update_id: str, witnesses: Sequence[Witness]) -> dict[str, PushError]:
    """Return the servers that failed by themselves in update ``update_id``, which ended with ``error``; by address.

    One that lost its lease is among them: ask for what a trainer lost that was silent itself with `lost_by_silence`.
    """
    found: dict[str, PushError] = {}
    if isinstance(error, PushError) and error.server is not None and error.code not in CONSEQUENCES:
        found[error.server] = error
    for witness in witnesses:
        own = _own_failure(witness, update_id)
        if own is not None:
            found.setdefault(witness.url, own)
    return found


def suspects(
    error: WeightPushError, witnesses: Sequence[Witness], silent: Collection[str] = frozenset()
) -> dict[str, PushError]:
    """Return whom to leave out where no server has failed by its own account; none where it may be the trainer.

    First those whose connections broke as the trainer's end saw it, then those that were ``silent`` when they were told
    to end the update (a worker that hangs keeps its server from it), then those that are behind the others, and last
    the one that answered with ``error``: who reports a consequence first need not be its cause.
    """
    lost = [witness.url for witness in witnesses if witness.url in error.details.get(LOST_SERVERS, ())]
    lost = lost or [witness.url for witness in witnesses if witness.url in silent]
    if not lost and error.code in CONSEQUENCES:
        lost = _laggards(witnesses)
    if not lost and isinstance(error, PushError) and error.server is not None:
        lost = [error.server]
    return {url: _blamed(error, url) for url in lost}


def _own_failure(witness: Witness, update_id: str) -> PushError | None:
    answer = witness.answer
    if isinstance(answer, Exception):
        if isinstance(answer, WeightPushError):
            return PushError.of(answer, witness.url)
        return PushError(ErrorCode.UNREACHABLE, f"{type(answer).__name__}: {answer}", server=witness.url)
    if answer.instance_id != witness.instance_id:
        return PushError(
            ErrorCode.WORKER_LOST, "the server was started anew during the push", server=witness.url, state=answer.state
        )
    last = answer.last_error
    if last is None or last.code in CONSEQUENCES or last.update_id not in {update_id, None}:
        return None
    return PushError(
        last.code, last.message, server=witness.url, details=last.details, update_id=update_id, state=answer.state
    )


def _laggards(witnesses: Sequence[Witness]) -> list[str]:
    """Return the servers with the slowest worker, unless all are equally far."""
    done = {
        witness.url: min((worker.buckets_done for worker in witness.answer.workers), default=0)
        for witness in witnesses
        if isinstance(witness.answer, Status)
    }
    fewest = min(done.values(), default=0)
    slow = [url for url, buckets in done.items() if buckets == fewest]
    return slow if len(slow) < len(done) else []


def _blamed(error: WeightPushError, url: str) -> PushError:
    return PushError(
        error.code, error.message, server=url, details=error.details, update_id=error.update_id, state=error.state
    )
