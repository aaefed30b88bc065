"""Carries an update from ``begin`` to its end. One in each API process; any of them may get any call of an update.

What must survive a change of process lives in the shared record: every step first takes the update from there, which
fails if it has ended meanwhile, and then does its work. Nothing here writes a state by itself: the methods of
``ControlRecord`` do.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginRequest,
    FinishAnswer,
    FinishRequest,
    InFlight,
    ManifestAnswer,
    Status,
    StreamAnswer,
    StreamRequest,
    VerifyAnswer,
    VerifyRequest,
)
from weightpush_protocol.state import Phase, ServerState
from weightpush_server.drain import drain
from weightpush_server.engine import Engine
from weightpush_server.records import ControlRecord, UpdateRecord, WorkerRecord, build_status
from weightpush_server.shared_state import SharedState
from weightpush_server.verify import WorkerReport, combine_reports
from weightpush_server.ways import summarise

_POLL_S = 0.005
#: Seconds that the clean-up of a failed update may delay the news of its failure.
_CLEANUP_S = 5.0

_T = TypeVar("_T")


class Coordinator:
    """The calls under ``/reload``, without HTTP."""

    def __init__(self, shared: SharedState, engine: Engine) -> None:
        self._shared = shared
        self._engine = engine
        # Work goes on when its caller hangs up, and a repeated call joins it: begin and finish are idempotent.
        self._running: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def status(self) -> Status:
        """Return the public status. Never waits."""
        return build_status(self._shared.control(), self._shared.worker_records())

    async def manifest(self) -> ManifestAnswer:
        """Return the checkpoint that this server expects, as its first worker knows it."""
        answers = await self._engine.call("weightpush_manifest")
        return ManifestAnswer.model_validate_json(answers[0]["manifest"])

    async def verify(self, request: VerifyRequest) -> VerifyAnswer:
        """Compare what the workers hold with the last commit, and that with a checkpoint. Generation waits meanwhile.

        Raises:
            WeightPushError: ``not_serving`` while there is nothing whole to look at.
        """
        if not self._shared.control().state.serving:
            raise WeightPushError(
                ErrorCode.NOT_SERVING,
                "the server does not serve, so there are no whole weights to verify; push first",
                state=self._shared.control().state,
            )
        answers = await self._engine.call("weightpush_verify", request.model_dump_json())
        reports = [WorkerReport.model_validate_json(answer["report"]) for answer in answers]
        return combine_reports(
            reports,
            request,
            committed=combine_fingerprints([report.committed for report in reports]),
            now=combine_fingerprints([report.now for report in reports]),
        )

    # begin

    async def begin(self, request: BeginRequest) -> BeginAnswer:
        """Check, rendezvous, close the gate, drain, open; or refuse."""
        update_id = request.update_id or uuid.uuid4().hex
        return await self._once("begin", update_id, lambda: self._begin(update_id, request))

    async def _begin(self, update_id: str, request: BeginRequest) -> BeginAnswer:
        mine, update = self._reserve(update_id, request)
        if not mine:
            return await self._join_begin(update_id)
        return await self._or_fail(update_id, self._prepare(update, request))

    def _reserve(self, update_id: str, request: BeginRequest) -> tuple[bool, UpdateRecord]:
        digest = request.manifest.digest()
        with self._shared.transaction() as control:
            if control.find_ended(update_id) is not None:
                control.active(update_id)  # Raises what became of it.
            running = control.update
            if running is not None:
                if running.update_id == update_id and running.manifest_digest == digest:
                    control.active(update_id)
                    return False, running
                raise WeightPushError(
                    ErrorCode.UPDATE_IN_PROGRESS,
                    f"update {running.update_id} is running ({running.phase.value}); finish or abort it first",
                    details={"running": running.update_id, "phase": running.phase.value},
                    update_id=running.update_id,
                    state=control.state,
                )
            control.epoch += 1
            control.update = UpdateRecord(
                update_id=update_id,
                epoch=control.epoch,
                manifest_digest=digest,
                mode=request.mode,
                origin=control.state,
                weight_version=request.weight_version,
                transport=request.transport.name,
                in_flight=request.in_flight,
                digest=request.digest,
                deadlines=request.deadlines,
                tensors_total=len(request.manifest.tensors),
                bytes_total=request.manifest.nbytes,
                buckets_total=len(request.manifest.buckets),
            )
            return True, control.update

    async def _join_begin(self, update_id: str) -> BeginAnswer:
        """Wait for a ``begin`` that another process works on."""
        while True:
            answer = self._shared.control().active(update_id).begin_answer
            if answer is not None:
                return answer
            await asyncio.sleep(_POLL_S)

    async def _prepare(self, update: UpdateRecord, request: BeginRequest) -> BeginAnswer:
        update_id, epoch = update.update_id, update.epoch
        self._check_ranks(request)
        body = request.model_dump_json()
        await self._engine.call("weightpush_check", body)
        self._enter(update_id, Phase.RENDEZVOUS)
        await self._engine.call("weightpush_connect", epoch, body)
        # The workers give up by themselves, with the reason; the extra seconds only let them say so.
        await self._workers(
            update_id, lambda worker: worker.connected, request.deadlines.rendezvous_s + 2, ErrorCode.RENDEZVOUS_FAILED
        )
        with self._change(update_id) as (control, running):
            running.enter(Phase.DRAINING)
            control.close_gate()
        await drain(self._shared, self._engine, self._shared.control().active(update_id))
        with self._change(update_id) as (_, running):
            running.enter(Phase.OPENING)
            running.written = True
        opened = await self._engine.call("weightpush_open", epoch)
        answer = BeginAnswer(
            update_id=update_id,
            epoch=epoch,
            accepted_transport=request.transport.name,
            plan=summarise(request.manifest.tensors, [answer["ways"] for answer in opened]),
        )
        with self._change(update_id) as (_, running):
            running.enter(Phase.RECEIVING)
            running.begin_answer = answer
        return answer

    def _check_ranks(self, request: BeginRequest) -> None:
        transport = request.transport
        if transport.world_size is None:
            return
        if transport.rank_offset + self._shared.workers > transport.world_size:
            raise WeightPushError(
                ErrorCode.INVALID_REQUEST,
                f"this server has {self._shared.workers} workers, which from rank {transport.rank_offset} on do not "
                f"fit a data plane of {transport.world_size} ranks",
                details={"workers": self._shared.workers},
            )

    # stream

    async def announce(self, request: StreamRequest) -> StreamAnswer:
        """Let the workers expect a bucket on the collective transport."""
        update_id, bucket = request.update_id, request.bucket
        return await self._or_fail(update_id, self._announce(request, update_id, bucket))

    async def _announce(self, request: StreamRequest, update_id: str, bucket: int) -> StreamAnswer:
        self._check_worker_errors(self._shared.control().active(update_id, request.epoch))
        with self._change(update_id, request.epoch) as (_, update):
            fresh = _take_bucket(update, bucket, request.call_id)
        if update.transport == "http":
            raise _bucket_error(update, bucket, "was announced, but this update takes buckets as request bodies")
        if fresh:
            await self._engine.call("weightpush_expect", update.epoch, bucket, request.digests, None)
        return self._progress(update, bucket)

    async def land_body(
        self, update_id: str, epoch: int | None, bucket: int | None, call_id: str | None, spool: Path
    ) -> StreamAnswer:
        """Land a bucket that came as a request body and lies in ``spool``; returns when all workers have landed it."""
        return await self._or_fail(update_id, self._land_body(update_id, epoch, bucket, call_id, spool))

    async def _land_body(
        self, update_id: str, epoch: int | None, bucket: int | None, call_id: str | None, spool: Path
    ) -> StreamAnswer:
        with self._change(update_id, epoch) as (_, update):
            number = update.buckets_announced if bucket is None else bucket
            fresh = _take_bucket(update, number, call_id)
        if update.transport != "http":
            raise _bucket_error(update, number, f"came as a request body, but this update goes over {update.transport}")
        if fresh:
            await self._engine.call("weightpush_expect", update.epoch, number, {}, str(spool))
        await self._workers(
            update_id,
            lambda worker: worker.buckets_done > number,
            update.deadlines.bucket_s,
            ErrorCode.DEADLINE_EXCEEDED,
        )
        return self._progress(update, number)

    # finish

    async def finish(self, request: FinishRequest) -> FinishAnswer:
        """Close, prove, reset caches, publish, resume."""
        ended = self._shared.control().find_ended(request.update_id)
        if ended is not None and ended.answer is not None:
            return ended.answer
        return await self._once("finish", request.update_id, lambda: self._finish(request))

    async def _finish(self, request: FinishRequest) -> FinishAnswer:
        update_id = request.update_id
        with self._change(update_id, request.epoch) as (control, update):
            if update.finishing:
                joining = True
            else:
                self._check_complete(control, update)
                joining, update.finishing = False, True
        if joining:
            return await self._join_finish(update_id)
        return await self._or_fail(update_id, self._commit(update))

    def _check_complete(self, control: ControlRecord, update: UpdateRecord) -> None:
        """Refuse a premature ``finish``; the update goes on."""
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

    async def _join_finish(self, update_id: str) -> FinishAnswer:
        while True:
            ended = self._shared.control().find_ended(update_id)
            if ended is not None and ended.answer is not None:
                return ended.answer
            self._shared.control().active(update_id)
            await asyncio.sleep(_POLL_S)

    async def _commit(self, update: UpdateRecord) -> FinishAnswer:
        update_id, deadlines = update.update_id, update.deadlines
        await self._workers(
            update_id,
            lambda worker: worker.tensors_done >= update.tensors_total,
            deadlines.bucket_s,
            ErrorCode.DEADLINE_EXCEEDED,
        )
        # Shielded: an RPC that is given up goes on in the worker, where the epoch keeps it from doing harm.
        publishing = asyncio.ensure_future(self._close_and_publish(update))
        done, _ = await asyncio.wait({publishing}, timeout=deadlines.commit_s)
        if publishing not in done:
            publishing.add_done_callback(_swallow)
            raise WeightPushError(
                ErrorCode.DEADLINE_EXCEEDED, f"the update was not committed within commit_s = {deadlines.commit_s:g} s"
            )
        return publishing.result()

    async def _close_and_publish(self, update: UpdateRecord) -> FinishAnswer:
        update_id, epoch = update.update_id, update.epoch
        self._enter(update_id, Phase.CLOSING)
        proofs = await self._engine.call("weightpush_close", epoch)
        fingerprint = combine_fingerprints([proof["fingerprint"] for proof in proofs])
        self._enter(update_id, Phase.RESETTING_CACHES)
        await self._engine.reset_caches()
        self._enter(update_id, Phase.PUBLISHING)
        if update.in_flight is not InFlight.KEEP:
            # Whatever reached the paused engine unseen was promised the old weights: it must not run on the new ones.
            await self._engine.pause("abort", timeout_s=update.deadlines.commit_s)
        await self._engine.call("weightpush_commit", epoch, update.weight_version)
        await self._engine.label(update.weight_version)
        with self._change(update_id) as (control, _):
            control.publish(fingerprint=fingerprint)
        await self._engine.resume()
        with self._change(update_id) as (control, _):
            return control.commit(fingerprint=fingerprint, tensors=update.tensors_total)

    # abort and failure

    async def abort(self, request: AbortRequest) -> Status:
        """End an update. Repeated, or after another failure, it changes nothing."""
        control = self._shared.control()
        ended = control.find_ended(request.update_id)
        if ended is None or ended.error is None:
            control.active(request.update_id, request.epoch)
            message = f"aborted: {request.reason}"
            await self.fail(
                request.update_id, WeightPushError(ErrorCode.ABORTED, message, details={"reason": request.reason})
            )
        return self.status()

    async def fail(self, update_id: str, error: WeightPushError) -> None:
        """End the running update with ``error`` if it is still ``update_id``; any process may do so, one will."""
        with self._shared.transaction() as control:
            update = control.update
            if update is None or update.update_id != update_id or update.failure is not None:
                return
            update.failure = error.body().error
        # Before the state changes: a late pause or resume must not meet the next update.
        cleaning = asyncio.ensure_future(self._clean_up(update))
        await asyncio.wait({cleaning}, timeout=_CLEANUP_S)
        cleaning.add_done_callback(_swallow)
        with self._shared.transaction() as control:
            if control.update is not None and control.update.update_id == update_id:
                control.fail(error)
                error.update_id, error.state = update_id, control.state

    async def _clean_up(self, update: UpdateRecord) -> None:
        if self._engine.dead:
            return
        if update.gate_closed is not None and not update.written and update.origin is ServerState.SERVING:
            await self._engine.resume()
        elif update.written:
            # Frozen requests would hang for as long as the server is failed.
            await self._engine.pause("abort", timeout_s=_CLEANUP_S)
        await self._engine.call("weightpush_abandon", update.epoch)

    async def _or_fail(self, update_id: str, work: Coroutine[Any, Any, _T]) -> _T:
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
                error = WeightPushError.from_detail(ErrorDetail.model_validate(error.details["cause"]))
            elif error.code not in (ErrorCode.STALE_UPDATE, ErrorCode.UPDATE_FAILED):
                await self.fail(update_id, error)
            error.update_id = update_id
            error.state = self._shared.control().state
            if error is raised:
                raise
            raise error from raised
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            failure = WeightPushError(ErrorCode.INTERNAL, message, details={"exception": type(error).__name__})
            await self.fail(update_id, failure)
            raise failure from error

    # helpers

    async def _once(self, call: str, update_id: str, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run ``work`` in a task that outlives its caller; the same call again waits for the same task."""
        key = (call, update_id)
        task: asyncio.Task[_T] | None = self._running.get(key)
        if task is None:
            task = asyncio.create_task(work(), name=f"weightpush-{call}-{update_id}")
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    @contextmanager
    def _change(self, update_id: str, epoch: int | None = None) -> Iterator[tuple[ControlRecord, UpdateRecord]]:
        """Lend the control record and its running update for a change; fails if the update has ended."""
        with self._shared.transaction() as control:
            update = control.active(update_id, epoch)
            update.lease_renewed = time.monotonic()
            yield control, update

    def _enter(self, update_id: str, phase: Phase) -> None:
        with self._change(update_id) as (_, update):
            update.enter(phase)

    async def _workers(
        self, update_id: str, ready: Callable[[WorkerRecord], bool], timeout_s: float, code: ErrorCode
    ) -> None:
        """Wait until every worker is ``ready`` for this update, one has failed, or time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            update = self._shared.control().active(update_id)
            self._check_worker_errors(update)
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
            await asyncio.sleep(_POLL_S)

    def _check_worker_errors(self, update: UpdateRecord) -> None:
        if (error := worker_error(self._shared, update)) is not None:
            raise error

    def _progress(self, update: UpdateRecord, bucket: int) -> StreamAnswer:
        status = self.status().update
        return StreamAnswer(
            update_id=update.update_id,
            bucket=bucket,
            tensors_done=status.tensors_done if status is not None else 0,
            tensors_total=update.tensors_total,
            bytes_done=status.bytes_done if status is not None else 0,
            bytes_total=update.bytes_total,
        )


def worker_error(shared: SharedState, update: UpdateRecord) -> WeightPushError | None:
    """Return the first error that a worker reports for ``update``."""
    for worker in shared.worker_records():
        if worker.epoch == update.epoch and worker.error is not None:
            return WeightPushError.from_detail(worker.error)
    return None


def _take_bucket(update: UpdateRecord, bucket: int, call_id: str | None) -> bool:
    """Count ``bucket`` as announced; ``False`` for a retry of the last call."""
    if call_id is not None and call_id == update.last_call_id and bucket == update.buckets_announced - 1:
        return False
    if update.phase is not Phase.RECEIVING or update.finishing:
        raise _bucket_error(update, bucket, f"came while the update was {update.phase.value}")
    if update.buckets_total and bucket >= update.buckets_total:
        raise _bucket_error(update, bucket, f"is beyond the plan of {update.buckets_total} buckets")
    if bucket != update.buckets_announced:
        again = bucket < update.buckets_announced
        what = "came twice" if again else f"came out of order: bucket {update.buckets_announced} is next"
        raise _bucket_error(update, bucket, what)
    update.buckets_announced += 1
    update.last_call_id = call_id
    return True


def _bucket_error(update: UpdateRecord, bucket: int, what: str) -> WeightPushError:
    return WeightPushError(
        ErrorCode.BUCKET_OUT_OF_ORDER,
        f"bucket {bucket} {what}",
        details={"bucket": bucket, "next": update.buckets_announced},
    )


def combine_fingerprints(fingerprints: list[str]) -> str:
    """Return one fingerprint for a server: its worker's own, or a digest over those of all workers in rank order."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[: len(fingerprints[0])]


def _swallow(task: asyncio.Future[Any]) -> None:
    # Its outcome no longer matters, but an exception that nobody fetched would be logged as lost.
    if not task.cancelled():
        task.exception()
