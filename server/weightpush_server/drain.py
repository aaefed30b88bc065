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
from weightpush_server.engine import Engine, PauseMode
from weightpush_server.records import UpdateRecord
from weightpush_server.shared_state import SharedState

#: Seconds that aborted requests get to send what they have before the gate ends them.
_GRACE_S = 1.0
#: Seconds after which a request that does not even end by eviction fails the update.
_EVICTION_S = 10.0
_POLL_S = 0.01
_LOOK_S = 0.05


async def drain(shared: SharedState, engine: Engine, update: UpdateRecord) -> None:
    """Bring the engine to rest for ``update``; its gate is closed already.

    Whatever this raises, the engine may be paused then; the caller undoes that.

    Raises:
        WeightPushError: ``drain_failed``, if requests could not be ended, or what became of the update, if it ends
            meanwhile.
    """
    drainage = _Drainage(shared, engine, update)
    if update.in_flight is InFlight.KEEP:
        if not await drainage.pause("keep", update.deadlines.drain_s):
            raise _failed(f"running requests were not frozen within {update.deadlines.drain_s:g} s")
        return
    deadline = time.monotonic() + (update.deadlines.drain_s if update.in_flight is InFlight.WAIT else 0.0)
    if await drainage.ended_by_themselves(deadline):
        # Nothing came over HTTP any more; background work of vLLM's own may still run in the engine.
        left = deadline - time.monotonic()
        if left > 0 and await drainage.pause("wait", left):
            return
    await drainage.abort()


class _Drainage:
    """Looks before every step and in every wait whether its update still runs."""

    def __init__(self, shared: SharedState, engine: Engine, update: UpdateRecord) -> None:
        self._shared = shared
        self._engine = engine
        self._update_id = update.update_id

    def _check(self) -> None:
        self._shared.control().active(self._update_id)

    async def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        """Pause the engine; return whether that was complete in time."""
        self._check()
        pausing = self._engine.start_pause(mode)
        deadline = time.monotonic() + timeout_s
        while not pausing.done() and time.monotonic() < deadline:
            await asyncio.wait({pausing}, timeout=min(_LOOK_S, timeout_s))
            self._check()
        if pausing.done():
            pausing.result()
        return pausing.done()

    async def ended_by_themselves(self, deadline: float) -> bool:
        """Wait until the gate counts no request; ``False`` when time is over."""
        while self._shared.in_flight():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
            self._check()
        return True

    async def abort(self) -> None:
        """End what still runs."""
        started = time.monotonic()
        while True:
            # Again in every round: a request that was on its way to the engine has arrived there since.
            if not await self.pause("abort", _EVICTION_S):
                raise _failed(f"the engine did not come to rest within {_EVICTION_S:g} s of aborting its requests")
            if not self._shared.in_flight():
                return
            waited = time.monotonic() - started
            if waited > _GRACE_S:
                with self._shared.transaction() as control:
                    control.active(self._update_id).evict = True
            if waited > _EVICTION_S:
                raise _failed(f"{self._shared.in_flight()} requests could not be ended within {_EVICTION_S:g} s")
            await asyncio.sleep(_LOOK_S)


def _failed(why: str) -> WeightPushError:
    return WeightPushError(ErrorCode.DRAIN_FAILED, f"{why}; nothing was changed")
