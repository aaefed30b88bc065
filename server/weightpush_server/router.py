"""HTTP routes under ``/reload``. Bodies are read here, within limits; everything else is the coordinator's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import ManifestFacts
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginCall,
    BucketNumber,
    DiskReloadRequest,
    Epoch,
    FinishAnswer,
    FinishRequest,
    KeepAnswer,
    KeepRequest,
    ManifestAnswer,
    PrepareAnswer,
    PrepareRequest,
    RollbackRequest,
    StreamAnswer,
    StreamRequest,
    UpdateId,
    VerifyAnswer,
    VerifyRequest,
)
from weightpush_protocol.status import HistoryAnswer, Status
from weightpush_server.bodies import MANIFEST_BODY_S, SMALL_BODY_BYTES, SMALL_BODY_S, read_json, read_query, spooled
from weightpush_server.context import ServerContext
from weightpush_server.error_route import ErrorRoute
from weightpush_server.openapi import json_body, query, responses

_EVENT_POLL_S: Final = 0.1
_HEARTBEAT_S: Final = 15.0

_BUCKET_BODY: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

_Model = TypeVar("_Model", bound=BaseModel)


class _ErrorRoute(ErrorRoute):
    """Answers in the one error shape of this protocol."""

    @staticmethod
    def answer(error: WeightPushError) -> Response:
        # What comes late is not waited for.
        headers = {"Connection": "close"} if error.code is ErrorCode.SLOW_BODY else None
        return _json(error.body(), error.http_status, headers)


router = APIRouter(prefix="/reload", tags=["weightpush"], route_class=_ErrorRoute)


def _context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.weightpush
    return context


def _json(body: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body.model_dump_json(), status_code=status, media_type="application/json", headers=headers)


def _status_response(status: Status) -> Response:
    return _json(status, 200 if status.serving else 503)


class _StreamQuery(BaseModel):
    update_id: UpdateId
    epoch: Epoch | None = None
    bucket: BucketNumber | None = None
    call_id: UpdateId | None = None


async def _manifest_body(request: Request, model: type[_Model]) -> _Model:
    limit = _context(request).config.max_manifest_bytes
    return await read_json(request, model, limit=limit, within_s=MANIFEST_BODY_S)


async def _small_body(request: Request, model: type[_Model]) -> _Model:
    return await read_json(request, model, limit=SMALL_BODY_BYTES, within_s=SMALL_BODY_S)


@router.get("/status", responses=responses(Status, or_503=True))
async def status(request: Request) -> Response:
    """State, version, progress and last error. 200 while the server serves, else 503 with the same body."""
    return _status_response(_context(request).coordinator.status())


@router.get("/manifest", responses=responses(ManifestAnswer))
async def manifest(request: Request) -> Response:
    """Names, dtypes and shapes of the checkpoint that this server expects."""
    return Response(await _context(request).coordinator.manifest(), media_type="application/json")


@router.post("/verify", responses=responses(VerifyAnswer), openapi_extra=json_body(VerifyRequest))
async def verify(request: Request) -> Response:
    """Whether the server still holds what was committed, and whether that is the checkpoint of the body."""
    context = _context(request)
    body = await _manifest_body(request, VerifyRequest)
    return _json(await context.coordinator.verify(body))


@router.post("/begin", responses=responses(BeginAnswer), openapi_extra=json_body(BeginCall))
async def begin(request: Request) -> Response:
    """Open an update: check it, bring up the data plane, close the gate, drain, open the model."""
    context = _context(request)
    body = await _manifest_body(request, BeginCall)
    facts = await context.coordinator.manifest_facts(body)
    check_bucket_sizes(body.transport.name, facts, context.config.max_bucket_bytes)
    return _json(await context.coordinator.begin(body, facts))


def check_bucket_sizes(transport: str, facts: ManifestFacts, limit: int) -> None:
    """Refuse a plan whose buckets could not be sent: the trainer cuts them, and a body has a limit here.

    Raises:
        WeightPushError: ``too_large``.
    """
    largest = facts.largest_bucket
    if transport == "http" and largest > limit:
        raise WeightPushError(
            ErrorCode.TOO_LARGE,
            f"the plan has a bucket of {largest} bytes, and this server takes bodies of at most {limit}: push with "
            "smaller buckets (bucket_bytes, --bucket-mb), or start the server with a larger --max-bucket-mb",
            details={"largest_bytes": largest, "limit_bytes": limit},
        )


@router.post(
    "/stream",
    responses=responses(StreamAnswer),
    openapi_extra={**json_body(StreamRequest, **_BUCKET_BODY), "parameters": query(_StreamQuery)},
)
async def stream(request: Request) -> Response:
    """Announce a bucket (JSON), or bring it (any other content type: a safetensors file)."""
    context = _context(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        body = await _manifest_body(request, StreamRequest)
        return _json(await context.coordinator.announce(body))
    where = _stream_query(request)
    async with _spooled(request, context, where) as spool:
        return _json(
            await context.coordinator.land_body(where.update_id, where.epoch, where.bucket, where.call_id, spool)
        )


def _stream_query(request: Request) -> _StreamQuery:
    """Read where a body belongs. Without ``update_id`` it belongs to the update that runs (for curl)."""
    values: dict[str, Any] = dict(request.query_params)
    if "update_id" not in values:
        running = _context(request).shared.control().update
        if running is None:
            raise WeightPushError(ErrorCode.STALE_UPDATE, "no update is running; POST /reload/begin first")
        values["update_id"] = running.update_id
    return read_query(values, _StreamQuery)


@asynccontextmanager
async def _spooled(request: Request, context: ServerContext, where: _StreamQuery) -> AsyncIterator[Path]:
    """Keep a bucket in a file until the workers have landed it; one that does not come in time fails its update."""
    coordinator = context.coordinator
    update = context.shared.control().active(where.update_id, where.epoch)  # Else its body is not worth reading.
    try:
        async with spooled(
            request,
            context.spool,
            limit=context.config.max_bucket_bytes,
            within_s=update.deadlines.bucket_s,
            arriving=lambda: coordinator.renew_lease(where.update_id),
        ) as path:
            yield path
    except WeightPushError as error:
        if error.code is ErrorCode.SLOW_BODY:
            await coordinator.lose(update, error)
        raise


@router.post("/keep", responses=responses(KeepAnswer), openapi_extra=json_body(KeepRequest))
async def keep(request: Request) -> Response:
    """Renew the lease of an update while its trainer waits for other servers."""
    context = _context(request)
    body = await _small_body(request, KeepRequest)
    return _json(context.coordinator.keep(body))


@router.post("/prepare", responses=responses(PrepareAnswer), openapi_extra=json_body(PrepareRequest))
async def prepare(request: Request) -> Response:
    """Do all of finish that can be done before the new weights serve; with several servers, the call before it."""
    context = _context(request)
    body = await _small_body(request, PrepareRequest)
    return _json(await context.coordinator.prepare(body))


@router.post("/finish", responses=responses(FinishAnswer), openapi_extra=json_body(FinishRequest))
async def finish(request: Request) -> Response:
    """Post-process, prove, reset caches, publish the version, serve."""
    context = _context(request)
    body = await _small_body(request, FinishRequest)
    return _json(await context.coordinator.finish(body))


@router.post("", responses=responses(FinishAnswer), openapi_extra=json_body(DiskReloadRequest))
async def load(request: Request) -> Response:
    """Load a checkpoint directory from below a ``--reload-root``: a whole update in one call."""
    context = _context(request)
    body = await _manifest_body(request, DiskReloadRequest)
    return _json(await context.coordinator.load(body))


@router.post("/rollback", responses=responses(FinishAnswer), openapi_extra=json_body(RollbackRequest))
async def rollback(request: Request) -> Response:
    """Go back to the weights of before, of which the server keeps a copy."""
    context = _context(request)
    body = await _small_body(request, RollbackRequest)
    return _json(await context.coordinator.rollback(body))


@router.post("/abort", responses=responses(Status, or_503=True), openapi_extra=json_body(AbortRequest))
async def abort(request: Request) -> Response:
    """End the update."""
    context = _context(request)
    body = await _small_body(request, AbortRequest)
    return _json(await context.coordinator.abort(body))


@router.get("/history", responses=responses(HistoryAnswer))
async def history(request: Request) -> Response:
    """How the last ten updates ended, the latest first: outcome, phases, sizes, errors."""
    return _json(_context(request).coordinator.history())


@router.get("/ui", include_in_schema=False)
async def ui(request: Request) -> Response:
    """The status page, for people. Holds nothing about this server but the origins that it may read."""
    return _context(request).page.response()


@router.get("/events", response_class=StreamingResponse, responses=responses(None))
async def events(request: Request) -> Response:
    """Server-sent events: the status at once, and again whenever it changes."""
    return StreamingResponse(
        _event_stream(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


def _stopping(request: Request) -> bool:
    """Whether this process was told to end; it waits for open connections then."""
    server = getattr(request.app.state, "server", None)
    return bool(getattr(server, "should_exit", False))


async def _event_stream(request: Request) -> AsyncIterator[str]:
    coordinator = _context(request).coordinator
    last: dict[str, Any] = {}
    loop = asyncio.get_running_loop()
    spoke = loop.time()
    while not await request.is_disconnected() and not _stopping(request):
        status = coordinator.status()
        seen = status.model_dump(mode="json", exclude={"update": {"lease_expires_at"}})
        if seen != last:
            last = seen
            spoke = loop.time()
            yield f"event: status\ndata: {status.model_dump_json()}\n\n"
        elif loop.time() - spoke > _HEARTBEAT_S:
            spoke = loop.time()
            yield ": still here\n\n"
        await asyncio.sleep(_EVENT_POLL_S)
