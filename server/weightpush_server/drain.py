"""Emptying the engine before the first write: what passed the gate must not run on weights that came later.

Order matters. First the gate counters fall to zero by themselves (``wait``); only then is the engine paused, since a
paused engine lets a late request wait for ever. What is left at the deadline is aborted in the engine, and what still
hangs between HTTP and the engine is evicted by the gate with a 503.
"""

from __future__ import annotations

import asyncio
import time

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import InFlight
from weightpush_server.engine import Engine
from weightpush_server.records import UpdateRecord
from weightpush_server.shared_state import SharedState

#: Seconds that aborted requests get to send what they have before the gate ends them.
_GRACE_S = 1.0
#: Seconds after which a request that does not even end by eviction fails the update.
_EVICTION_S = 10.0
_POLL_S = 0.01


async def drain(shared: SharedState, engine: Engine, update: UpdateRecord) -> None:
    """Bring the engine to rest for ``update``; its gate is closed already.

    Raises:
        WeightPushError: ``drain_failed``, if requests could not be ended. The engine may then be paused.
    """
    if update.in_flight is InFlight.KEEP:
        if not await engine.pause("keep", timeout_s=update.deadlines.drain_s):
            raise _failed(f"running requests were not frozen within {update.deadlines.drain_s:g} s")
        return
    deadline = time.monotonic() + (update.deadlines.drain_s if update.in_flight is InFlight.WAIT else 0.0)
    if await _ended_by_themselves(shared, deadline):
        # Nothing came over HTTP any more; background work of vLLM's own may still run in the engine.
        left = deadline - time.monotonic()
        if left > 0 and await engine.pause("wait", timeout_s=left):
            return
    await _abort(shared, engine, update.update_id)


async def _ended_by_themselves(shared: SharedState, deadline: float) -> bool:
    while shared.in_flight():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _abort(shared: SharedState, engine: Engine, update_id: str) -> None:
    started = time.monotonic()
    while True:
        # Again in every round: a request that was on its way to the engine has arrived there since.
        if not await engine.pause("abort", timeout_s=_EVICTION_S):
            raise _failed(f"the engine did not come to rest within {_EVICTION_S:g} s of aborting its requests")
        if not shared.in_flight():
            return
        waited = time.monotonic() - started
        if waited > _GRACE_S:
            with shared.transaction() as control:
                control.active(update_id).evict = True
        if waited > _EVICTION_S:
            raise _failed(f"{shared.in_flight()} requests could not be ended within {_EVICTION_S:g} s")
        await asyncio.sleep(5 * _POLL_S)


def _failed(why: str) -> WeightPushError:
    return WeightPushError(ErrorCode.DRAIN_FAILED, f"{why}; nothing was changed")
