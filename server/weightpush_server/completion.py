"""From the last bucket to the commit: what is left of an update when all its bytes are on their way."""

from __future__ import annotations

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import FinishAnswer, FinishRequest, PrepareAnswer, PrepareRequest, UpdateMode
from weightpush_protocol.state import Phase
from weightpush_server.lifecycle import Looks, UpdateLifecycle
from weightpush_server.publishing import Publisher
from weightpush_server.records import ControlRecord, UpdateRecord
from weightpush_server.shared_state import SharedState


class Completion:
    """``finish``, and ``prepare``, which does beforehand what can be done before the new weights serve."""

    def __init__(self, shared: SharedState, lifecycle: UpdateLifecycle, publisher: Publisher) -> None:
        self._shared = shared
        self._life = lifecycle
        self._publisher = publisher

    async def prepare(self, request: PrepareRequest) -> PrepareAnswer:
        """Do all of ``finish`` that can be done before the new weights serve, and wait for ``finish`` then."""
        return await self._life.once(("prepare", request.update_id), lambda: self._prepare(request))

    async def _prepare(self, request: PrepareRequest) -> PrepareAnswer:
        update_id = request.update_id
        ended = self._shared.control().find_ended(update_id)
        if ended is not None and ended.answer is not None:  # Repeated, after ``finish``.
            return PrepareAnswer(update_id=update_id, epoch=ended.epoch, fingerprint=ended.answer.fingerprint)
        with self._life.change(update_id, request.epoch) as (control, update):
            mine = not (update.preparing or update.finishing)
            if mine:
                self._check_complete(control, update)
                update.preparing = True
        if not mine:
            return await self._prepared(update_id)
        return await self._life.step(update_id, self._make_ready(update))

    async def _prepared(self, update_id: str) -> PrepareAnswer:
        """Wait for a ``prepare`` that another call or process works on."""
        looks = Looks()
        while True:
            update = self._shared.control().active(update_id)
            if update.prepare_answer is not None:
                return update.prepare_answer
            if not update.preparing:
                finished = await self._life.committed(update_id)  # Which does all of it.
                return PrepareAnswer(update_id=update_id, epoch=update.epoch, fingerprint=finished.fingerprint)
            await looks.pause()

    async def _make_ready(self, update: UpdateRecord) -> PrepareAnswer:
        fingerprint = None
        await self._all_landed(update)
        if update.mode is UpdateMode.DIRECT:
            fingerprint = await self._publisher.prove(update)
        else:
            await self._take_staged(update)
        answer = PrepareAnswer(update_id=update.update_id, epoch=update.epoch, fingerprint=fingerprint)
        with self._life.change(update.update_id) as (_, running):
            running.enter(Phase.PREPARED)
            running.prepare_answer = answer
        return answer

    async def finish(self, request: FinishRequest) -> FinishAnswer:
        """Close, prove, reset caches, as far as ``prepare`` has not; publish, resume."""
        answer = self._life.answer(request.update_id)
        if answer is not None:
            return answer
        return await self._life.once(("finish", request.update_id), lambda: self._finish(request))

    async def _finish(self, request: FinishRequest) -> FinishAnswer:
        update_id = request.update_id
        if self._shared.control().active(update_id, request.epoch).preparing:
            await self._prepared(update_id)
        with self._life.change(update_id, request.epoch) as (control, update):
            mine = not update.finishing
            if mine:
                self._check_complete(control, update)
                update.finishing = True
        if not mine:
            return await self._life.committed(update_id)
        return await self._life.step(update_id, self._commit(update))

    def _check_complete(self, control: ControlRecord, update: UpdateRecord) -> None:
        """Refuse a premature ``prepare`` or ``finish``; the update goes on."""
        if update.prepare_answer is not None:
            return
        workers = [worker for worker in self._shared.worker_records() if worker.epoch == update.epoch]
        announced, total = update.buckets_announced, update.buckets_total
        tensors = min((worker.tensors_done for worker in workers), default=0)
        complete = announced == total if total else tensors == update.tensors_total
        if update.phase is Phase.RECEIVING and complete:
            return
        missing = f"{announced} of {total} buckets" if total else f"{tensors} of {update.tensors_total} tensors"
        raise WeightPushError(
            ErrorCode.INCOMPLETE_UPDATE,
            f"update {update.update_id} is not complete: {missing} came; send the rest, or abort",
            update_id=update.update_id,
            state=control.state,
        )

    async def _commit(self, update: UpdateRecord) -> FinishAnswer:
        prepared = update.prepare_answer
        if prepared is None:
            await self._all_landed(update)
        if update.mode is UpdateMode.DIRECT:
            return await self._publisher.publish(update, prepared.fingerprint if prepared is not None else None)
        if prepared is None:
            await self._take_staged(update)
        await self._publisher.close_gate_and_drain(update.update_id)
        return await self._publisher.land_and_publish(update)

    async def _all_landed(self, update: UpdateRecord) -> None:
        await self._life.workers(
            update.update_id,
            lambda worker: worker.tensors_done >= update.tensors_total,
            update.deadlines.bucket_s,
            ErrorCode.DEADLINE_EXCEEDED,
        )

    async def _take_staged(self, update: UpdateRecord) -> None:
        """Do all for staged tensors that can be done while the old weights serve: the pause is for what is left."""
        update_id, commit_s = update.update_id, update.deadlines.commit_s
        answers = await self._life.rpc(update_id, commit_s, "weightpush_staged", update.epoch)
        stored = next(answer["stored"] for answer in answers if "stored" in answer)
        await self._life.read_stored(update, stored)
