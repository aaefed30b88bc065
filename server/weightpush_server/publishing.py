"""From the open gate to the new version: what all updates have in common, wherever their tensors come from."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.limits import SETTLE_S, publish_s
from weightpush_protocol.messages import FinishAnswer, InFlight
from weightpush_protocol.state import Phase
from weightpush_server.drain import drain
from weightpush_server.engine import Engine, swallow
from weightpush_server.lifecycle import UpdateLifecycle
from weightpush_server.records import UpdateRecord
from weightpush_server.shared_state import SharedState
from weightpush_server.timing import slowest

Hook = Callable[[], Awaitable[None]]
_T = TypeVar("_T")


class Publisher:
    """The steps of an update while the gate is closed. Each takes the update from the shared record first."""

    def __init__(self, shared: SharedState, engine: Engine, lifecycle: UpdateLifecycle) -> None:
        self._shared = shared
        self._engine = engine
        self._life = lifecycle

    async def close_gate_and_drain(self, update_id: str) -> None:
        """Bring the engine to rest; when this returns the model may be written to, and else nothing has changed."""
        with self._life.change(update_id) as (control, running):
            running.enter(Phase.DRAINING)
            control.close_gate()
            running.draining = True
        try:
            await drain(self._shared, self._engine, running)
            with self._life.change(update_id) as (_, running):
                running.enter(Phase.OPENING)
                running.written = True
                running.draining = False
        except BaseException:
            await self._life.leave_drain(running)
            raise

    async def open(self, update: UpdateRecord) -> None:
        """Give the model its checkpoint layout back."""
        await self._life.rpc(update.update_id, update.deadlines.commit_s, "weightpush_open", update.epoch)

    async def land_and_publish(self, update: UpdateRecord, after_landing: Hook | None = None) -> FinishAnswer:
        """Open the model, land what is stored on this host, and publish it, all within ``commit_s``.

        ``after_landing`` may still refuse the result by raising.
        """

        async def work() -> FinishAnswer:
            await self.open(update)
            self._life.enter(update.update_id, Phase.LANDING)
            await self._life.rpc(update.update_id, update.deadlines.commit_s, "weightpush_land", update.epoch)
            if after_landing is not None:
                await after_landing()
            return await self._close_and_publish(update)

        return await self._within_commit(update, work())

    async def prove(self, update: UpdateRecord) -> str:
        """Close the model, prove it and reset caches, within ``commit_s``; return the fingerprint."""
        return await self._within_commit(update, self._close(update))

    async def publish(self, update: UpdateRecord, fingerprint: str | None) -> FinishAnswer:
        """Publish the version and resume, within ``commit_s``; before that, `prove` what has no ``fingerprint`` yet."""
        if fingerprint is not None:
            return await self._within_commit(update, self._publish(update, fingerprint))
        return await self._within_commit(update, self._close_and_publish(update))

    async def _within_commit(self, update: UpdateRecord, work: Coroutine[Any, Any, _T]) -> _T:
        # Never cancelled: an RPC that is given up goes on in the worker, where the epoch keeps it from doing harm.
        publishing = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({publishing}, timeout=update.deadlines.commit_s)
        running = self._shared.control().update
        if not done and running is not None and running.epoch == update.epoch and running.phase is Phase.PUBLISHING:
            done, _ = await asyncio.wait({publishing}, timeout=publish_s(update.deadlines))
        if publishing not in done:
            publishing.add_done_callback(swallow)
            raise WeightPushError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"the update was not committed within commit_s = {update.deadlines.commit_s:g} s",
            )
        return publishing.result()

    async def _close_and_publish(self, update: UpdateRecord) -> FinishAnswer:
        return await self._publish(update, await self._close(update))

    async def _close(self, update: UpdateRecord) -> str:
        self._life.enter(update.update_id, Phase.CLOSING)
        proofs = await self._engine.call("weightpush_close", update.epoch)
        with self._life.change(update.update_id) as (_, running):
            running.worker_seconds = slowest(proof["seconds"] for proof in proofs)
            running.enter(Phase.RESETTING_CACHES)
        await self._engine.reset_caches()
        return combine_fingerprints([proof["fingerprint"] for proof in proofs])

    async def _publish(self, update: UpdateRecord, fingerprint: str) -> FinishAnswer:
        update_id, epoch = update.update_id, update.epoch
        self._life.enter(update_id, Phase.PUBLISHING)
        if update.in_flight is not InFlight.KEEP:
            # Whatever reached the paused engine unseen was promised the old weights: it must not run on the new ones.
            await self._engine.pause("abort", timeout_s=update.deadlines.commit_s)
        await self._engine.call("weightpush_commit", epoch, update.weight_version)
        await self._engine.label(update.weight_version)
        await self._engine.resume()
        with self._life.change(update_id) as (control, _):
            answer = control.commit(fingerprint=fingerprint)
        settling = asyncio.ensure_future(self._engine.call("weightpush_settle"))
        settling.add_done_callback(swallow)
        await asyncio.wait({settling}, timeout=SETTLE_S)
        return answer


def combine_fingerprints(fingerprints: list[str]) -> str:
    """Return one fingerprint for a server: its worker's own, or a digest over those of all workers in rank order."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()
