"""What every step of an update stands on: taking it from the shared record, waiting for its workers, failing it.

What must survive a change of process lives in the shared record: every step first takes the update from there, which
fails if it has ended meanwhile, and then does its work. Nothing here writes a state by itself: the methods of
``ControlRecord`` do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.messages import FinishAnswer
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_server.engine import Engine, swallow
from weightpush_server.records import ControlRecord, UpdateRecord, WorkerRecord, shortened
from weightpush_server.shared_state import SharedState

#: How often the shared record is looked at by whoever waits for a change in it: a tenth of the time waited so far, but
#: within these seconds. What takes a millisecond is not waited for five, and what takes long costs next to nothing.
_SHORTEST_POLL_S: Final = 0.0003
_LONGEST_POLL_S: Final = 0.005
#: Seconds that the clean-up of a failed update may delay the news of its failure.
_CLEANUP_S: Final = 5.0

_T = TypeVar("_T")


class Looks:
    """The pauses between looks of one wait."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    async def pause(self) -> None:
        """Wait until the next look is due."""
        waited = time.monotonic() - self._started
        await asyncio.sleep(min(max(waited / 10, _SHORTEST_POLL_S), _LONGEST_POLL_S))


class UpdateLifecycle:
    """The running update of a server, as one of its API processes sees it."""

    def __init__(self, shared: SharedState, engine: Engine) -> None:
        self._shared = shared
        self._engine = engine
        # Work goes on when its caller hangs up, and a repeated call joins it: begin and finish are idempotent.
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        #: Carries out a rollback that nobody asked for; set by whoever can.
        self.undo: Callable[[UpdateRecord], Coroutine[Any, Any, object]] | None = None

    def reserve(
        self, update_id: str, request_digest: str, make: Callable[[ControlRecord], UpdateRecord]
    ) -> tuple[bool, UpdateRecord]:
        """Make an update the running one, see ``ControlRecord.reserve``; ``False``: it is running already."""
        with self._shared.transaction() as control:
            return control.reserve(update_id, request_digest, make)

    @property
    def idle(self) -> bool:
        """Whether no update runs."""
        return self._shared.control().update is None

    def kept(self, role: CopyRole) -> CopyStatus | None:
        """Return the kept copy that has ``role``, if there is one."""
        copies = (copy for worker in self._shared.worker_records() for copy in worker.copies)
        return next((copy for copy in copies if copy.role is role), None)

    def answer(self, update_id: str) -> FinishAnswer | None:
        """Return the answer of an update that was committed; ``None`` for any other."""
        ended = self._shared.control().find_ended(update_id)
        return ended.answer if ended is not None else None

    def answer_again(self, update_id: str, request_digest: str) -> FinishAnswer | None:
        """Return the answer of an update that was one single call, if this call repeats it; ``None`` for a new one.

        Raises:
            WeightPushError: ``stale_update``: that was another request, or its weights are not served any more.
        """
        control = self._shared.control()
        ended = control.find_ended(update_id)
        if ended is None or ended.answer is None:
            return None
        if ended.request_digest == request_digest and ended.epoch == control.committed_epoch:
            return ended.answer
        was = "as this request" if ended.request_digest == request_digest else "as another request"
        raise WeightPushError(
            ErrorCode.STALE_UPDATE,
            f"update {update_id} was committed {was} with version {ended.answer.weight_version}; version "
            f"{control.weight_version} is in force now. Ask under a new update_id",
            update_id=update_id,
            state=control.state,
        )

    async def committed(self, update_id: str) -> FinishAnswer:
        """Wait until the running update is committed by another call or process.

        Raises:
            WeightPushError: what became of it instead.
        """
        looks = Looks()
        while True:
            answer = self.answer(update_id)
            if answer is not None:
                return answer
            self._shared.control().active(update_id)
            await looks.pause()

    @contextmanager
    def change(self, update_id: str, epoch: int | None = None) -> Iterator[tuple[ControlRecord, UpdateRecord]]:
        """Lend the control record and its running update for a change; renews the lease.

        Raises:
            WeightPushError: the update has ended, or is another one; see ``ControlRecord.active``.
        """
        with self._shared.transaction() as control:
            update = control.active(update_id, epoch)
            update.lease_renewed = time.monotonic()
            yield control, update

    def enter(self, update_id: str, phase: Phase) -> None:
        """Go on to ``phase``."""
        with self.change(update_id) as (_, update):
            update.enter(phase)

    async def once(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run ``work`` in a task that outlives its caller; the same ``key`` again waits for the same task."""
        return await asyncio.shield(self._start(key, work))

    def _start(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, _T]]) -> asyncio.Task[_T]:
        task: asyncio.Task[_T] | None = self._running.get(key)
        if task is None:
            task = asyncio.create_task(work())
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
            task.add_done_callback(swallow)
        return task

    async def workers(
        self, update_id: str, ready: Callable[[WorkerRecord], bool], timeout_s: float, code: ErrorCode
    ) -> None:
        """Wait until every worker is ``ready`` for this update.

        Raises:
            WeightPushError: the update ended, a worker failed, or (``code``) some were not ready within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        looks = Looks()
        while True:
            update = self._shared.control().active(update_id)
            self.check_workers(update)
            records = [self._shared.worker(rank) for rank in range(self._shared.workers)]
            late = [
                rank
                for rank, record in enumerate(records)
                if record is None or record.epoch != update.epoch or not ready(record)
            ]
            if not late:
                return
            if time.monotonic() >= deadline:
                raise WeightPushError(
                    code,
                    f"workers {late} were not ready within {timeout_s:g} s ({update.phase.value})",
                    details={"workers": late, "phase": update.phase.value},
                )
            await looks.pause()

    def worker_error(self, update: UpdateRecord) -> WeightPushError | None:
        """Return the first error that a worker reports for ``update``."""
        for worker in self._shared.worker_records():
            if worker.epoch == update.epoch and worker.error is not None:
                return WeightPushError.from_detail(worker.error)
        return None

    def check_workers(self, update: UpdateRecord) -> None:
        """Raise the first error that a worker reports for ``update``."""
        if (error := self.worker_error(update)) is not None:
            raise error

    async def step(self, update_id: str, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a step of an update; if the step breaks, the update has failed.

        A step during which somebody else ended the update gets the reason; one that comes later gets
        ``update_failed``.
        """
        update = self._shared.control().update
        was_running = update is not None and update.update_id == update_id and update.failure is None
        try:
            return await work
        except WeightPushError as raised:
            error = raised
            if error.code is ErrorCode.UPDATE_FAILED and was_running:
                await self._until_ended(update_id)
                error = WeightPushError.from_detail(ErrorDetail.model_validate(error.details["cause"]))
            elif was_running and (cause := self._cause(update_id)) is not None:
                # Somebody else ended it, and this step stumbled over that.
                await self._until_ended(update_id)
                error = cause
            elif error.code not in (ErrorCode.STALE_UPDATE, ErrorCode.UPDATE_FAILED):
                await self.fail(update_id, error)
            await self._until_undone(update_id)
            error.update_id = update_id
            error.state = self._shared.control().state
            if error is raised:
                raise
            raise error from raised
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            failure = WeightPushError(ErrorCode.INTERNAL, message, details={"exception": type(error).__name__})
            await self.fail(update_id, failure)
            await self._until_undone(update_id)
            failure.state = self._shared.control().state
            raise failure from error

    def _cause(self, update_id: str) -> WeightPushError | None:
        """Return why an update has failed, or is being given up; ``None`` if it has not."""
        control = self._shared.control()
        update, ended = control.update, control.find_ended(update_id)
        detail = ended.error if ended is not None else None
        if update is not None and update.update_id == update_id:
            detail = update.failure
        return WeightPushError.from_detail(detail) if detail is not None else None

    async def fail(self, update_id: str, error: WeightPushError) -> None:
        """End the running update with ``error`` if it is still ``update_id``; any process may do so, one will.

        When this returns the update has ended, whoever ended it.
        """
        with self._shared.transaction() as control:
            update = control.update
            if update is None or update.update_id != update_id:
                return
            if error.code is ErrorCode.ABORTED and update.phase is Phase.PUBLISHING:
                mine = False  # Past the point of no return: the engine may answer with the new weights already.
            else:
                mine = update.failure is None
            if mine:
                update.failure = shortened(error.body().error)
        if not mine:
            await self._until_ended(update_id)
            return
        # Before the state changes: a late pause or resume must not meet the next update.
        cleaning = asyncio.ensure_future(self._clean_up(update))
        cleaning.add_done_callback(swallow)
        await asyncio.wait({cleaning}, timeout=_CLEANUP_S)
        with self._shared.transaction() as control:
            if control.update is None or control.update.update_id != update_id:
                return
            control.fail(error)
            error.update_id, error.state = update_id, control.state
            copy = self.kept(CopyRole.SERVED)
            undoing = None
            if copy is not None and self.undo is not None and not self._engine.dead:
                # In the same step: no other update may come between.
                undoing = control.begin_undoing(update, copy)
        if undoing is not None and self.undo is not None:
            undo, running = self.undo, undoing
            self._start(("undo", undoing.update_id), lambda: undo(running))

    async def _until_undone(self, update_id: str) -> None:
        """Wait while the server goes back to the weights of before a failed update; its deadlines end that."""
        looks = Looks()
        while True:
            running = self._shared.control().update
            if running is None or running.undoes != update_id:
                return
            await looks.pause()

    async def _until_ended(self, update_id: str) -> None:
        """Wait while somebody else carries out the failure of an update."""
        deadline = time.monotonic() + 2 * _CLEANUP_S
        looks = Looks()
        while time.monotonic() < deadline:
            update = self._shared.control().update
            if update is None or update.update_id != update_id:
                return
            await looks.pause()

    async def _clean_up(self, update: UpdateRecord) -> None:
        if self._engine.dead:
            return
        # Whoever drains sees the failure, undoes its own pause and says so; two would undo each other's.
        looks = Looks()
        while (running := self._shared.control().update) is not None and running.draining:
            if running.update_id != update.update_id:
                return
            await looks.pause()
        if running is not None and running.written:
            # Frozen requests would hang for as long as the server is failed.
            await self._engine.pause("abort", timeout_s=_CLEANUP_S)
        await self._engine.call("weightpush_abandon", update.epoch)

    async def leave_drain(self, update: UpdateRecord) -> None:
        """Undo a drain whose update has ended or failed before its first write: the engine runs as before."""
        running = self._shared.control().update
        if running is None or running.update_id != update.update_id:
            return  # Given up on long ago; the engine may be another update's by now.
        try:
            if update.origin is ServerState.SERVING:
                await self._engine.resume()
        finally:
            with self._shared.transaction() as control:
                if control.update is not None and control.update.update_id == update.update_id:
                    control.update.draining = False

    async def rpc(self, update_id: str, timeout_s: float, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call all workers for an update, but wait no longer than ``timeout_s`` or than the update lasts.

        Raises:
            WeightPushError: the worker's error, what became of the update, or ``deadline_exceeded``.
        """
        return await self._engine.call_within(
            timeout_s, method, *args, look=lambda: self._shared.control().active(update_id)
        )

    async def read_stored(
        self, update: UpdateRecord, stored: str, *, begins: bool = False, restores: CopyRole | None = None
    ) -> None:
        """Tell all workers where the tensors of ``update`` lie, and wait until they could land at once.

        Raises:
            WeightPushError: see ``rpc``, and the worker's ``weightpush_stored``.
        """
        role, limit_s = None if restores is None else restores.value, update.deadlines.commit_s
        await self.rpc(
            update.update_id, limit_s, "weightpush_stored", update.epoch, update.weight_version, stored, begins, role
        )
        await self.workers(update.update_id, lambda worker: worker.source_ready, limit_s, ErrorCode.DEADLINE_EXCEEDED)
