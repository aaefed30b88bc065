"""Updates whose tensors lie on the server's own host: a rollback to a kept copy, a checkpoint on disk."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.limits import SETTLE_S
from weightpush_protocol.messages import DigestKind, FinishAnswer, RollbackRequest, UpdateMode
from weightpush_protocol.state import ServerState
from weightpush_protocol.status import CopyRole
from weightpush_server.engine import Engine
from weightpush_server.hostcopy import no_copy
from weightpush_server.lifecycle import UpdateLifecycle
from weightpush_server.log import logger
from weightpush_server.publishing import Hook, Publisher
from weightpush_server.records import FROM_COPY, ControlRecord, UpdateRecord
from weightpush_server.stored import StoredCheckpoint

Make = Callable[[ControlRecord], UpdateRecord]
Find = Callable[[UpdateRecord], Awaitable[StoredCheckpoint]]


class StoredUpdates:
    """One call is the whole update: check, close the gate, drain, open, land, close, prove, publish."""

    def __init__(self, engine: Engine, lifecycle: UpdateLifecycle, publisher: Publisher) -> None:
        self._engine = engine
        self._life = lifecycle
        self._publisher = publisher
        lifecycle.undo = self._undo

    async def run(
        self,
        update_id: str,
        request_digest: str,
        make: Make,
        find: Find,
        *,
        before_write: Hook | None = None,
        after_landing: Hook | None = None,
    ) -> FinishAnswer:
        """Carry out an update of stored tensors; repeated with the same id and digest, it is the same update.

        Args:
            make: gives the update's record, from the control record with its epoch in place; may refuse.
            find: says where the tensors are, after the update is the running one. The old weights serve meanwhile.
            before_write: called last before the gate closes; raising leaves everything as it was.
            after_landing: called when all tensors have landed; raising fails the update.

        Raises:
            WeightPushError: a refusal, or why the update failed.
        """
        answer = self._life.answer_again(update_id, request_digest)
        if answer is not None:
            return answer

        async def work() -> FinishAnswer:
            mine, update = self._life.reserve(update_id, request_digest, make)
            if not mine:
                return await self._life.committed(update_id)
            return await self._life.step(update_id, self._carry_out(update, find, before_write, after_landing))

        return await self._life.once(("stored", update_id, request_digest), work)

    async def _carry_out(
        self, update: UpdateRecord, find: Find, before_write: Hook | None, after_landing: Hook | None
    ) -> FinishAnswer:
        update_id = update.update_id
        if update.mode is UpdateMode.STAGED:
            with self._life.change(update_id) as (control, _):
                control.stage()
        stored = await find(update)
        with self._life.change(update_id) as (_, running):
            running.tensors_total, running.bytes_total = len(stored.tensors), stored.nbytes
        await self._life.read_stored(update, stored.to_json(), begins=True, restores=update.restores)
        if before_write is not None:
            await before_write()
        await self._publisher.close_gate_and_drain(update_id)
        return await self._publisher.land_and_publish(running, after_landing)

    # Going back

    async def rollback(self, request: RollbackRequest) -> FinishAnswer:
        """Go back to a kept copy: from ``failed`` to the version committed last, else to the one before it.

        Raises:
            WeightPushError: ``no_copy``, before anything is changed; else why the update failed.
        """
        update_id = request.update_id or uuid.uuid4().hex
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        if self._life.idle:
            # The copy of what was committed a moment ago may not be in its place yet.
            await self._engine.call_within(2 * SETTLE_S, "weightpush_settle")

        def make(control: ControlRecord) -> UpdateRecord:
            role = CopyRole.SERVED if control.state is ServerState.FAILED else CopyRole.PREVIOUS
            copy = self._life.kept(role)
            if copy is None or control.state is ServerState.AWAITING_WEIGHTS:
                raise no_copy(role)
            return UpdateRecord(
                update_id=update_id,
                epoch=control.epoch,
                request_digest=digest,
                mode=UpdateMode.DIRECT,
                origin=control.state,
                weight_version=copy.weight_version,
                transport=FROM_COPY,
                in_flight=request.in_flight,
                digest=DigestKind.NONE,
                deadlines=request.deadlines,
                restores=role,
            )

        return await self.run(update_id, digest, make, self._find_copy)

    async def _undo(self, update: UpdateRecord) -> None:
        logger.warning("going back to version %s, of which a copy is kept", update.weight_version)
        await self._life.step(update.update_id, self._carry_out(update, self._find_copy, None, None))

    async def _find_copy(self, update: UpdateRecord) -> StoredCheckpoint:
        assert update.restores is not None
        answers = await self._life.rpc(
            update.update_id, update.deadlines.commit_s, "weightpush_kept", update.restores.value
        )
        answer = next(answer for answer in answers if "stored" in answer)
        if answer["weight_version"] != update.weight_version:
            raise WeightPushError(
                ErrorCode.UPDATE_IN_PROGRESS,
                f"version {answer['weight_version']} took the place of {update.weight_version} just now; nothing was "
                "changed. Look at the status, and ask again",
            )
        return StoredCheckpoint.from_json(answer["stored"])
