"""``/pause`` and ``/resume``. A pause is no lock on the weights: resuming opens nothing that an update has closed.

While a server is held, requests that come wait at the gate, outside the engine, as vLLM would let them wait inside;
when they are let in they are answered by what is served then, under its own version.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import InFlight
from weightpush_server.engine import Engine
from weightpush_server.log import logger
from weightpush_server.shared_state import SharedState

#: Seconds that running requests get to end, or to freeze.
PAUSE_S: Final = 240.0
_LOOK_S: Final = 0.02


class Holding:
    """The pause that a trainer asked for, in the shared record."""

    def __init__(self, shared: SharedState, engine: Engine) -> None:
        self._shared = shared
        self._engine = engine

    @property
    def paused(self) -> bool:
        """Whether a request that came now would not be answered."""
        return not self._shared.control().gate_open

    async def pause(self, mode: InFlight) -> None:
        """Hold requests that come; end, freeze or await those that run.

        Raises:
            WeightPushError: ``drain_failed``: they did not within ``PAUSE_S``; nothing is held then.
        """
        with self._shared.transaction() as control:
            control.held = mode
            if control.update is not None or not control.state.serving:
                return  # The engine is the update's, or rests already.
        deadline = time.monotonic() + PAUSE_S
        while mode is InFlight.WAIT and self._shared.in_flight():
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(_LOOK_S)
        if not await self._engine.pause(mode.value, timeout_s=max(deadline - time.monotonic(), _LOOK_S)):
            await self.resume()
            raise WeightPushError(
                ErrorCode.DRAIN_FAILED, f"running requests did not end within {PAUSE_S:g} s; the pause was taken back"
            )
        logger.info("paused (%s) by a trainer; requests wait until it resumes", mode.value)

    async def resume(self) -> None:
        """Hold no longer. The engine runs again unless the weights are in pieces or an update has stopped it."""
        with self._shared.transaction() as control:
            held, control.held = control.held, None
            engine_is_free = control.update is None and control.state.serving
        if held is not None and engine_is_free:
            await self._engine.resume()
