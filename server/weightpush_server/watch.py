"""What an API process does without being asked: end updates that nobody will finish, evict what the gate holds."""

from __future__ import annotations

import asyncio
import time

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.engine import Engine
from weightpush_server.gate import Gate
from weightpush_server.lifecycle import UpdateLifecycle
from weightpush_server.log import logger
from weightpush_server.records import UpdateRecord
from weightpush_server.shared_state import SharedState

_TICK_S = 0.05


class Watchdog:
    """Looks at the running update every ``_TICK_S`` seconds. One in each API process; one of them will act."""

    def __init__(self, shared: SharedState, engine: Engine, lifecycle: UpdateLifecycle, gate: Gate) -> None:
        self._shared = shared
        self._engine = engine
        self._life = lifecycle
        self._gate = gate

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                update = self._shared.control().update
                if update is not None:
                    await self._look_at(update)
            except Exception:  # noqa: BLE001 - without the watchdog a dead trainer would block the server for ever
                logger.exception("weightpush's watchdog")
            await asyncio.sleep(_TICK_S)

    async def _look_at(self, update: UpdateRecord) -> None:
        if update.evict:
            self._gate.evict()
        if update.failure is None and (error := self._lost(update)) is not None:
            await self._life.fail(update.update_id, error)

    def _lost(self, update: UpdateRecord) -> WeightPushError | None:
        if self._engine.dead:
            return WeightPushError(ErrorCode.WORKER_LOST, "vLLM's engine died during the update; restart the server")
        if (error := self._life.worker_error(update)) is not None:
            return error
        # Else the server itself is at work, under a deadline of its own.
        if update.awaits_trainer:
            silent = time.monotonic() - self._last_sign(update)
            if silent > self._patience(update):
                return WeightPushError(
                    ErrorCode.LEASE_LOST,
                    f"the trainer was silent for {silent:.1f} s, longer than lease_s = {update.deadlines.lease_s:g} s, "
                    f"after {update.buckets_announced} of {update.buckets_total or 'an unknown number of'} buckets",
                    details={"lease_s": update.deadlines.lease_s, "buckets_announced": update.buckets_announced},
                )
        return None

    def _patience(self, update: UpdateRecord) -> float:
        """Return for how long the trainer may be silent: an announced bucket has a deadline of its own to arrive."""
        landed = [w.buckets_done for w in self._shared.worker_records() if w.epoch == update.epoch]
        under_way = min(landed, default=0) < update.buckets_announced
        return max(update.deadlines.lease_s, update.deadlines.bucket_s if under_way else 0.0)

    def _last_sign(self, update: UpdateRecord) -> float:
        """Return when the trainer last called or sent a byte."""
        landed = [w.progress_at for w in self._shared.worker_records() if w.epoch == update.epoch]
        return max([update.lease_renewed, *landed])
