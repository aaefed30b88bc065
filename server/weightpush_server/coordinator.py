"""Carries an update from ``begin`` to its end. One in each API process; any of them may get any call of an update."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.limits import REPORT_S
from weightpush_protocol.manifest import ManifestFacts
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginCall,
    DiskReloadRequest,
    FinishAnswer,
    FinishRequest,
    KeepAnswer,
    KeepRequest,
    PrepareAnswer,
    PrepareRequest,
    RollbackRequest,
    StreamAnswer,
    StreamRequest,
    UpdateMode,
    VerifyAnswer,
    VerifyRequest,
    utc_now,
)
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import HistoryAnswer, LastError, Status
from weightpush_protocol.transports.http import LENGTH_BYTES, header_bytes, parse_header
from weightpush_protocol.versions import mismatch
from weightpush_server.completion import Completion
from weightpush_server.disk_reload import DiskReloads
from weightpush_server.engine import Engine
from weightpush_server.lifecycle import Looks, UpdateLifecycle
from weightpush_server.public_status import build_status
from weightpush_server.publishing import Publisher, combine_fingerprints
from weightpush_server.records import ControlRecord, UpdateRecord
from weightpush_server.shared_state import SharedState
from weightpush_server.stored_updates import StoredUpdates
from weightpush_server.verify import WorkerReport, combine_reports
from weightpush_server.ways import summarise

_MANIFEST_S: Final = 30.0
#: Reading all weights once, at a few GB/s on a slow machine.
_VERIFY_S: Final = 600.0


class Coordinator:
    """The calls under ``/reload``, without HTTP."""

    def __init__(
        self, shared: SharedState, engine: Engine, lifecycle: UpdateLifecycle, reload_roots: Sequence[Path] = ()
    ) -> None:
        self._shared = shared
        self._engine = engine
        self._life = lifecycle
        self._publisher = Publisher(shared, engine, lifecycle)
        self._completion = Completion(shared, lifecycle, self._publisher)
        self._stored = StoredUpdates(engine, lifecycle, self._publisher)
        self._disk = DiskReloads(reload_roots, shared, lifecycle, self._stored)

    def status(self) -> Status:
        """Return the public status. Never waits."""
        control = self._shared.control()
        if self._engine.dead:
            control = control.model_copy(update={"state": ServerState.FAILED, "last_error": _engine_died(control)})
        return build_status(control, self._shared.worker_records())

    def history(self) -> HistoryAnswer:
        """Return how the last updates ended, the latest first. Never waits."""
        outcomes = self._shared.history().outcomes
        return HistoryAnswer(instance_id=self._shared.control().instance_id, updates=outcomes[::-1])

    async def manifest(self) -> str:
        """Return the checkpoint that this server expects as its first worker says it: JSON of a `ManifestAnswer`."""
        answers = await self._engine.call_within(_MANIFEST_S, "weightpush_manifest")
        text: str = answers[0]["manifest"]
        return text

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
        answers = await self._engine.call_within(_VERIFY_S, "weightpush_verify", request.model_dump_json())
        reports = [WorkerReport.model_validate_json(answer["report"]) for answer in answers]
        return combine_reports(
            reports,
            request,
            committed=combine_fingerprints([report.committed for report in reports]),
            now=combine_fingerprints([report.now for report in reports]),
        )

    # begin

    async def manifest_facts(self, call: BeginCall) -> ManifestFacts:
        """Return what the manifest of ``call`` adds up to.

        Raises:
            WeightPushError: ``unknown_manifest``: only its digest came, and a worker does not know it.
        """
        if call.manifest is not None:
            manifest = call.manifest
            return await asyncio.to_thread(lambda: manifest.facts)
        answers = await self._engine.call_within(_MANIFEST_S, "weightpush_facts", call.manifest_digest)
        return ManifestFacts.model_validate(answers[0]["facts"])

    async def begin(self, request: BeginCall, facts: ManifestFacts) -> BeginAnswer:
        """Check, rendezvous, close the gate, drain, open; or refuse. ``facts`` are those of its manifest."""
        if request.protocol is not None and (why := mismatch(client=request.protocol, server=PROTOCOL_VERSION)):
            raise WeightPushError(ErrorCode.PROTOCOL_MISMATCH, why)
        update_id = request.update_id or uuid.uuid4().hex
        # Off the event loop: a manifest may have hundreds of thousands of tensors.
        body = await asyncio.to_thread(request.model_dump_json)
        digest = hashlib.sha256(body.encode()).hexdigest()
        return await self._life.once(
            ("begin", update_id, digest), lambda: self._begin(update_id, digest, body, request, facts)
        )

    async def _begin(
        self, update_id: str, digest: str, body: str, request: BeginCall, facts: ManifestFacts
    ) -> BeginAnswer:
        def make(control: ControlRecord) -> UpdateRecord:
            return UpdateRecord(
                update_id=update_id,
                epoch=control.epoch,
                request_digest=digest,
                mode=control.mode_for(request.mode),
                origin=control.state,
                weight_version=request.weight_version,
                transport=request.transport.name,
                in_flight=request.in_flight,
                digest=request.digest,
                deadlines=request.deadlines,
                tensors_total=facts.tensors,
                bytes_total=facts.nbytes,
                buckets_total=facts.buckets,
            )

        mine, update = self._life.reserve(update_id, digest, make)
        if not mine:
            return await self._join_begin(update_id)
        if update.mode is not request.mode:
            body = await asyncio.to_thread(request.model_copy(update={"mode": update.mode}).model_dump_json)
        return await self._life.step(update_id, self._open(update, body, request))

    async def _join_begin(self, update_id: str) -> BeginAnswer:
        """Wait for a ``begin`` that another process works on."""
        looks = Looks()
        while True:
            answer = self._shared.control().active(update_id).begin_answer
            if answer is not None:
                return answer
            await looks.pause()

    async def _open(self, update: UpdateRecord, body: str, request: BeginCall) -> BeginAnswer:
        update_id, epoch, deadlines = update.update_id, update.epoch, request.deadlines
        self._check_ranks(request)
        checked = await self._life.rpc(update_id, deadlines.commit_s, "weightpush_check", epoch, body)
        self._life.enter(update_id, Phase.RENDEZVOUS)
        await self._life.rpc(update_id, deadlines.rendezvous_s, "weightpush_connect", epoch)
        # The workers give up by themselves, with the reason; the extra seconds only let them say so.
        await self._life.workers(
            update_id, lambda worker: worker.connected, deadlines.rendezvous_s + REPORT_S, ErrorCode.RENDEZVOUS_FAILED
        )
        staged = update.mode is UpdateMode.STAGED
        if not staged:
            await self._publisher.close_gate_and_drain(update_id)
            await self._publisher.open(update)
        answer = BeginAnswer(
            update_id=update_id,
            epoch=epoch,
            accepted_transport=request.transport.name,
            mode=update.mode,
            plan=summarise(update.tensors_total, update.bytes_total, [answer["ways"] for answer in checked]),
        )
        with self._life.change(update_id) as (control, running):
            if staged:
                control.stage()
            running.enter(Phase.RECEIVING)
            running.begin_answer = answer
        return answer

    def _check_ranks(self, request: BeginCall) -> None:
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
        """Let the workers expect a bucket, or several, on the transport of the update."""
        return await self._life.step(request.update_id, self._announce(request))

    async def _announce(self, request: StreamRequest) -> StreamAnswer:
        self._life.check_workers(self._shared.control().active(request.update_id, request.epoch))
        with self._life.change(request.update_id, request.epoch) as (_, update):
            fresh = update.take_bucket(request.bucket, request.call_id, as_body=False, count=request.count)
        if fresh:
            await self._life.rpc(
                request.update_id,
                update.deadlines.bucket_s,
                "weightpush_expect",
                update.epoch,
                request.bucket,
                request.digests,
                None,
                request.count,
            )
        return self._progress(update, request.bucket)

    def keep(self, request: KeepRequest) -> KeepAnswer:
        """Renew the lease of an update.

        Raises:
            WeightPushError: ``stale_update`` or ``update_failed``: it does not run; changes nothing.
        """
        with self._life.change(request.update_id, request.epoch) as (_, update):
            return KeepAnswer(update_id=update.update_id, epoch=update.epoch, lease_s=update.deadlines.lease_s)

    def renew_lease(self, update_id: str) -> None:
        """Note that bytes of ``update_id`` arrive."""
        with self._life.change(update_id):
            pass

    async def lose(self, update: UpdateRecord, error: WeightPushError) -> None:
        """Fail ``update`` because a bucket did not come, unless the bucket has come on another way since."""
        running = self._shared.control().update
        if running is None or running.update_id != update.update_id:
            return
        if running.buckets_announced == update.buckets_announced:
            await self._life.fail(update.update_id, error)
            error.update_id, error.state = update.update_id, self._shared.control().state

    async def land_body(
        self, update_id: str, epoch: int | None, bucket: int | None, call_id: str | None, spool: Path
    ) -> StreamAnswer:
        """Land a bucket that came as a request body and lies in ``spool``; returns when all workers have landed it.

        ``bucket`` may be left out where the sender cuts freely: then it is the next one.
        """
        return await self._life.step(update_id, self._land_body(update_id, epoch, bucket, call_id, spool))

    async def _land_body(
        self, update_id: str, epoch: int | None, bucket: int | None, call_id: str | None, spool: Path
    ) -> StreamAnswer:
        with self._life.change(update_id, epoch) as (_, update):
            number = update.buckets_announced if bucket is None else bucket
            fresh = update.take_bucket(number, call_id, as_body=True)
        if fresh:
            await self._life.rpc(
                update_id, update.deadlines.bucket_s, "weightpush_expect", update.epoch, number, {}, str(spool)
            )
        await self._life.workers(
            update_id,
            lambda worker: worker.buckets_done > number,
            update.deadlines.bucket_s,
            ErrorCode.DEADLINE_EXCEEDED,
        )
        return self._progress(update, number, landed=await asyncio.to_thread(_names_in, spool))

    def _progress(self, update: UpdateRecord, bucket: int, landed: list[str] | None = None) -> StreamAnswer:
        status = self.status().update
        return StreamAnswer(
            update_id=update.update_id,
            bucket=bucket,
            landed=landed or [],
            tensors_done=status.tensors_done if status is not None else 0,
            tensors_total=update.tensors_total,
            bytes_done=status.bytes_done if status is not None else 0,
            bytes_total=update.bytes_total,
        )

    # prepare and finish

    async def prepare(self, request: PrepareRequest) -> PrepareAnswer:
        """Take an update as far as it goes before the new weights serve, see ``Completion.prepare``."""
        return await self._completion.prepare(request)

    async def finish(self, request: FinishRequest) -> FinishAnswer:
        """Commit an update, see ``Completion.finish``."""
        return await self._completion.finish(request)

    # disk and rollback

    async def load(self, request: DiskReloadRequest) -> FinishAnswer:
        """Load a checkpoint from the server's disk, see ``DiskReloads.load``."""
        return await self._disk.load(request)

    async def rollback(self, request: RollbackRequest) -> FinishAnswer:
        """Go back to a kept copy, see ``StoredUpdates.rollback``."""
        return await self._stored.rollback(request)

    # abort

    async def abort(self, request: AbortRequest) -> Status:
        """End an update. Repeated, or after another failure, it changes nothing.

        Raises:
            WeightPushError: ``stale_update`` for one that was committed, or is not known; that one cannot begin later.
        """
        control = self._shared.control()
        if not control.knows(request.update_id):
            # Its begin may still be on the way, or wait for a thread. Should it have got here first, it runs now.
            with self._shared.transaction() as control:
                control.abort_ahead(request.update_id)
        update = control.update
        if update is not None and update.update_id == request.update_id:
            if update.failure is None:
                control.active(request.update_id, request.epoch)
            error = WeightPushError(ErrorCode.ABORTED, f"aborted: {request.reason}", details={"reason": request.reason})
            await self._life.fail(request.update_id, error)
        else:
            ended = control.find_ended(request.update_id)
            if ended is None or ended.error is None:
                control.active(request.update_id, request.epoch)
        return self.status()


def _engine_died(control: ControlRecord) -> LastError:
    """Return why a server serves nothing whose engine has died; it is about to end."""
    update_id = control.update.update_id if control.update is not None else None
    message = "vLLM's engine died; the server ends"
    return LastError(code=ErrorCode.WORKER_LOST, message=message, update_id=update_id, at=utc_now())


def _names_in(spool: Path) -> list[str]:
    """Return the names of the tensors in a body that has landed; none for a retry whose body came broken."""
    try:
        with spool.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            start += file.read(header_bytes(start) - len(start))
        return [spec.name for spec, _ in parse_header(start, total_bytes=spool.stat().st_size).entries]
    except WeightPushError:
        return []
