"""What vLLM's routes do to the running update. Any API process may get any call: what lasts is in the shared record."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Final

from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.limits import REPORT_S
from weightpush_protocol.messages import Deadlines, DigestKind, InFlight, UpdateMode
from weightpush_protocol.state import Phase
from weightpush_server.compat.messages import InitInfo, UpdateInfo
from weightpush_server.engine import Engine
from weightpush_server.lifecycle import Looks, UpdateLifecycle
from weightpush_server.publishing import Publisher
from weightpush_server.records import FROM_VLLM_TRAINER, ControlRecord, UpdateRecord
from weightpush_server.shared_state import SharedState

#: Seconds that the trainer and all workers have to meet. vLLM's own trainer waits for 300.
JOIN_S: Final = 120.0
#: Seconds that broadcasts which nobody wants may take altogether.
_DRAIN_S: Final = 600.0
#: Seconds that a trainer may take for one broadcast, and be silent between its calls. Until the end of a round the old
#: weights serve, so nothing is lost by patience.
BROADCAST_S: Final = 120.0
LEASE_S: Final = 120.0
_CALL_S: Final = 30.0
_LOOK_S: Final = 0.05


class VllmRounds:
    """The calls of a trainer, in their order. All raise ``WeightPushError``."""

    def __init__(self, shared: SharedState, engine: Engine, lifecycle: UpdateLifecycle, publisher: Publisher) -> None:
        self._shared = shared
        self._engine = engine
        self._life = lifecycle
        self._publisher = publisher
        self._deadlines = Deadlines(bucket_s=BROADCAST_S, lease_s=LEASE_S)

    # The trainer's group

    async def join(self, init: InitInfo) -> None:
        """Let all workers join the trainer's group; returns when they have. A group of before is left."""
        workers = self._shared.workers
        if init.rank_offset + workers > init.world_size:
            raise WeightPushError(
                ErrorCode.INVALID_REQUEST,
                f"this server has {workers} workers, which from rank {init.rank_offset} on do not fit a group of "
                f"{init.world_size} ranks: the trainer's world_size must be /get_world_size and one more",
                details={"workers": workers},
            )
        await self._give_up("a trainer connected anew")
        await self._call("weightpush_vllm_join", init.model_dump_json(), JOIN_S)
        try:
            await self._until_joined()
        except WeightPushError:
            await self._call("weightpush_vllm_leave")
            raise

    async def _until_joined(self) -> None:
        deadline = time.monotonic() + JOIN_S + REPORT_S
        while True:
            members = await self._call("weightpush_vllm_group")
            if all(member["joined"] for member in members):
                return
            for member in members:
                if member["problem"] is not None:
                    raise WeightPushError.from_detail(ErrorDetail.model_validate(member["problem"]))
                if not member["member"]:
                    raise WeightPushError(ErrorCode.RENDEZVOUS_FAILED, "the group was left before all had joined it")
            if time.monotonic() >= deadline:
                raise WeightPushError(
                    ErrorCode.RENDEZVOUS_FAILED, f"trainer and workers did not all meet within {JOIN_S:g} s"
                )
            await asyncio.sleep(_LOOK_S)

    async def leave(self) -> None:
        """Let all workers leave the trainer's group, if they are in one; a round that is open is given up."""
        await self._give_up("the trainer disconnected")
        await self._call("weightpush_vllm_leave")

    async def _give_up(self, reason: str) -> None:
        update = self._shared.control().update
        if update is None or update.transport != FROM_VLLM_TRAINER:
            return
        if update.finishing:
            raise WeightPushError(
                ErrorCode.UPDATE_IN_PROGRESS,
                f"update {update.update_id} is being committed: try again in a moment",
                update_id=update.update_id,
            )
        await self._life.fail(update.update_id, WeightPushError(ErrorCode.ABORTED, reason, details={"reason": reason}))

    # A round

    async def start(self) -> None:
        """Begin an update; repeated before it has brought anything, it is the same one.

        One that its trainer left open is given up: it has begun another, and nobody else is in its group.
        """
        for member in await self._call("weightpush_vllm_group"):
            if not member["joined"]:
                raise _not_joined(member["problem"])
        update_id = f"vllm-{uuid.uuid4().hex}"

        def make(control: ControlRecord) -> UpdateRecord:
            return UpdateRecord(
                update_id=update_id,
                epoch=control.epoch,
                request_digest=update_id,
                mode=control.mode_for(UpdateMode.STAGED),
                origin=control.state,
                weight_version=f"vllm-{control.epoch}",
                transport=FROM_VLLM_TRAINER,
                # Who was frozen by /pause shall go on; else there is nobody, or nothing was said.
                in_flight=InFlight.KEEP if control.held is InFlight.KEEP else InFlight.WAIT,
                digest=DigestKind.NONE,
                deadlines=self._deadlines,
            )

        running = self._shared.control().update
        if running is not None and running.transport == FROM_VLLM_TRAINER:
            if _is_fresh(running):
                return
            if self._buckets_done(running) >= running.buckets_announced:
                await self._give_up("its trainer began another update")
        _, update = self._life.reserve(update_id, update_id, make)
        await self._life.step(update_id, self._start(update))

    async def _start(self, update: UpdateRecord) -> None:
        await self._life.rpc(update.update_id, update.deadlines.commit_s, "weightpush_vllm_start", update.epoch)
        with self._life.change(update.update_id) as (control, running):
            if running.mode is UpdateMode.STAGED:
                control.stage()
            running.enter(Phase.RECEIVING)

    async def receive(self, info: UpdateInfo) -> None:
        """Collect the tensors that the trainer broadcasts meanwhile; returns when they are there.

        Whatever is refused is received first: a trainer would be stuck in a broadcast that nobody takes part in.
        """
        try:
            update = self._round()
            with self._life.change(update.update_id) as (_, running):
                if running.phase is not Phase.RECEIVING or running.finishing:
                    raise _closed(f"it is {running.phase.value}", running.update_id)
                number = running.buckets_announced
                running.buckets_announced += 1
        except WeightPushError:
            await self._drain(info)
            raise
        await self._life.step(update.update_id, self._receive(update, number, info))

    async def _receive(self, update: UpdateRecord, number: int, info: UpdateInfo) -> None:
        update_id, bucket_s = update.update_id, update.deadlines.bucket_s
        sizes = await self._life.rpc(
            update_id, bucket_s, "weightpush_vllm_receive", update.epoch, info.model_dump_json(), bucket_s
        )
        with self._life.change(update_id) as (_, running):
            running.tensors_total += sizes[0]["tensors"]
            running.bytes_total += sizes[0]["bytes"]
        looks = Looks()
        while True:
            self._life.check_workers(self._shared.control().active(update_id))
            workers = [worker for worker in self._shared.worker_records() if worker.epoch == update.epoch]
            if len(workers) == self._shared.workers and all(worker.buckets_done > number for worker in workers):
                return
            # Each broadcast has the worker's own deadline; here, only a worker that says nothing at all is noticed.
            last = max([update.lease_renewed, *(worker.progress_at for worker in workers)])
            if time.monotonic() - last > bucket_s + REPORT_S:
                raise WeightPushError(ErrorCode.DEADLINE_EXCEEDED, f"no tensor came within bucket_s = {bucket_s:g} s")
            await looks.pause()

    async def _drain(self, info: UpdateInfo) -> None:
        """Receive what nobody wants. What keeps a worker from that is told to the trainer in place of the refusal."""
        await self._call(
            "weightpush_vllm_receive", None, info.model_dump_json(), self._deadlines.bucket_s, give_up_s=_CALL_S
        )
        deadline = time.monotonic() + _DRAIN_S
        while any(member["busy"] for member in await self._call("weightpush_vllm_group")):
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(_LOOK_S)

    async def hang_up(self, error: WeightPushError) -> None:
        """End the round with ``error`` and leave the group: a call was not understood, so what it announced cannot be
        received, and its sender would wait in its broadcast for ever.
        """
        update = self._shared.control().update
        if update is not None and update.transport == FROM_VLLM_TRAINER and not update.finishing:
            await self._life.fail(update.update_id, error)
        await self._call("weightpush_vllm_leave")

    async def finish(self, weight_version: str | None) -> None:
        """Check that what came is a whole checkpoint, and commit it."""
        update_id = self._round().update_id
        with self._life.change(update_id) as (_, running):
            mine = not running.finishing
            if mine:
                if running.phase is not Phase.RECEIVING or self._buckets_done(running) < running.buckets_announced:
                    raise WeightPushError(
                        ErrorCode.INCOMPLETE_UPDATE,
                        f"update {update_id} still receives: wait for the answers to /update_weights",
                        update_id=update_id,
                    )
                running.finishing = True
                running.weight_version = weight_version or running.weight_version
        if not mine:
            await self._life.committed(update_id)
            return
        await self._life.once(("vllm-finish", update_id), lambda: self._life.step(update_id, self._commit(running)))

    async def _commit(self, update: UpdateRecord) -> None:
        update_id, epoch, commit_s = update.update_id, update.epoch, update.deadlines.commit_s
        answers = await self._life.rpc(update_id, commit_s, "weightpush_vllm_collected", epoch, update.weight_version)
        stored = next(answer["stored"] for answer in answers if "stored" in answer)
        await self._life.read_stored(update, stored)
        await self._publisher.close_gate_and_drain(update_id)
        await self._publisher.land_and_publish(update)

    def _buckets_done(self, update: UpdateRecord) -> int:
        workers = [worker for worker in self._shared.worker_records() if worker.epoch == update.epoch]
        return min((worker.buckets_done for worker in workers), default=0)

    def _round(self) -> UpdateRecord:
        control = self._shared.control()
        update = control.update
        if update is not None and update.transport == FROM_VLLM_TRAINER:
            return update
        last = control.last_error
        if last is not None and (last.update_id or "").startswith("vllm-"):
            raise _closed(f"the last one failed: {last.message}", last.update_id)
        raise _closed("POST /start_weight_update first", None)

    # Versions

    async def relabel(self, weight_version: str) -> None:
        """Give the weights that are served, or those of the round that is open, another name."""
        with self._shared.transaction() as control:
            update = control.update
            if update is not None and update.transport == FROM_VLLM_TRAINER and not update.finishing:
                update.weight_version = weight_version
                return
        self._check_settled(control)
        await self._call("weightpush_vllm_relabel", weight_version)
        await self._engine.label(weight_version)
        with self._shared.transaction() as now:
            if now.committed_epoch == control.committed_epoch:
                now.weight_version = weight_version

    @staticmethod
    def _check_settled(control: ControlRecord) -> None:
        if control.update is not None or not control.state.serving:
            raise WeightPushError(
                ErrorCode.UPDATE_IN_PROGRESS if control.update is not None else ErrorCode.NOT_SERVING,
                f"the server is {control.state.value}: a version belongs to whole weights, and is told with the update "
                "that brings them",
                state=control.state,
            )

    async def _call(self, method: str, *args: Any, give_up_s: float = _CALL_S) -> list[dict[str, Any]]:
        return await self._engine.call_within(give_up_s, method, *args)


def _is_fresh(update: UpdateRecord) -> bool:
    return update.buckets_announced == 0 and not update.finishing and update.failure is None


def _not_joined(problem: dict[str, Any] | None) -> WeightPushError:
    why = f"its connection is broken: {problem['message']}" if problem is not None else "none is connected"
    return WeightPushError(
        ErrorCode.TRANSPORT_UNAVAILABLE,
        f"the workers are in no trainer's group ({why}): POST /init_weight_transfer_engine while the trainer joins it",
    )


def _closed(why: str, update_id: str | None) -> WeightPushError:
    return WeightPushError(ErrorCode.STALE_UPDATE, f"no weight update is open: {why}", update_id=update_id)
