"""The server's state machine: one enum, one transition table, no I/O.

::

                begin(direct)            finish ok
      SERVING ───────────────► UPDATING ───────────► SERVING (new version)
        ▲  │ begin(staged)        │  error, abort after the first write, lease lost, worker lost
        │  ▼                      ▼
        │ STAGING ──finish──► UPDATING        FAILED ──begin(complete) / rollback / disk──► UPDATING
        │  │ abort, error, lease lost
        └──┘ (old version untouched, still serving)
      AWAITING_WEIGHTS ──begin──► UPDATING    (refuses to serve until the first complete push)

An update that ends before its first write goes back to the state it came from (its *origin*);
one that ends after it goes to ``FAILED``. Nothing outside this module decides what follows what.
"""

from __future__ import annotations

from enum import StrEnum


class ServerState(StrEnum):
    """What a server may do with its weights."""

    SERVING = "serving"
    STAGING = "staging"
    UPDATING = "updating"
    FAILED = "failed"
    AWAITING_WEIGHTS = "awaiting_weights"

    @property
    def serving(self) -> bool:
        """Whether generation routes answer in this state."""
        return self in _SERVING_STATES


class Event(StrEnum):
    """What can happen to a server's weights."""

    BEGIN_DIRECT = "begin_direct"
    BEGIN_STAGED = "begin_staged"
    LAND = "land"
    COMMIT = "commit"
    FAIL_UNTOUCHED = "fail_untouched"
    FAIL_WRITTEN = "fail_written"


class Phase(StrEnum):
    """Where a running update is; finer than the state and only for people and progress bars."""

    CHECKING = "checking"
    RENDEZVOUS = "rendezvous"
    DRAINING = "draining"
    OPENING = "opening"
    RECEIVING = "receiving"
    LANDING = "landing"
    CLOSING = "closing"
    RESETTING_CACHES = "resetting_caches"
    PREPARED = "prepared"
    PUBLISHING = "publishing"


_SERVING_STATES = frozenset({ServerState.SERVING, ServerState.STAGING})

#: States that an update can start from, and go back to when it fails before its first write.
ORIGINS = frozenset({ServerState.SERVING, ServerState.FAILED, ServerState.AWAITING_WEIGHTS})

#: ``(state, event) -> next state``; ``None`` stands for the update's origin.
TRANSITIONS: dict[tuple[ServerState, Event], ServerState | None] = {
    (ServerState.SERVING, Event.BEGIN_DIRECT): ServerState.UPDATING,
    (ServerState.FAILED, Event.BEGIN_DIRECT): ServerState.UPDATING,
    (ServerState.AWAITING_WEIGHTS, Event.BEGIN_DIRECT): ServerState.UPDATING,
    (ServerState.SERVING, Event.BEGIN_STAGED): ServerState.STAGING,
    (ServerState.STAGING, Event.LAND): ServerState.UPDATING,
    (ServerState.STAGING, Event.FAIL_UNTOUCHED): ServerState.SERVING,
    (ServerState.UPDATING, Event.COMMIT): ServerState.SERVING,
    (ServerState.UPDATING, Event.FAIL_UNTOUCHED): None,
    (ServerState.UPDATING, Event.FAIL_WRITTEN): ServerState.FAILED,
}


class IllegalTransitionError(ValueError):
    """An event that the table does not allow in this state: a bug of the caller, never a user's fault."""


def next_state(state: ServerState, event: Event, *, origin: ServerState) -> ServerState:
    """Return the state after ``event``.

    ``origin`` is the state that the running update started from.

    Raises:
        IllegalTransitionError: the table has no such row, or ``origin`` is no state an update starts from.
    """
    if origin not in ORIGINS:
        raise IllegalTransitionError(f"an update cannot come from {origin}")
    if (state, event) not in TRANSITIONS:
        raise IllegalTransitionError(f"{event} is not allowed in {state}")
    return TRANSITIONS[state, event] or origin
