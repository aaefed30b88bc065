"""HTTP routes under ``/reload``. Bodies are read here, within limits; everything else is the coordinator's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import NAMED_OFFENDERS
from weightpush_protocol.messages import (
    AbortRequest,
    BeginRequest,
    DiskReloadRequest,
    FinishRequest,
    RollbackRequest,
    Status,
    StreamRequest,
    VerifyRequest,
)
from weightpush_server.context import ServerContext
from weightpush_server.log import logger

_EVENT_POLL_S: Final = 0.1
_HEARTBEAT_S: Final = 15.0
_RENEW_S: Final = 0.5
#: Larger JSON bodies are validated off the event loop, so that the status still answers at once.
_SMALL_BODY_BYTES: Final = 64 * 1024

_Model = TypeVar("_Model", bound=BaseModel)


class _ErrorRoute(APIRoute):
    """Answers a ``WeightPushError`` in the one error shape, whatever handlers vLLM's application has."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except WeightPushError as error:
                return _json(error.body(), error.http_status)
            except ClientDisconnect:
                raise
            except Exception as error:  # noqa: BLE001 - every answer has the one error shape
                logger.exception("%s %s", request.method, request.url.path)
                failure = WeightPushError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"[:1000])
                return _json(failure.body(), failure.http_status)

        return guarded


router = APIRouter(prefix="/reload", tags=["weightpush"], route_class=_ErrorRoute)


def _context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.weightpush
    return context


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status_code=status, media_type="application/json")


def _status_response(status: Status) -> Response:
    return _json(status, 200 if status.serving else 503)


async def _body(request: Request, model: type[_Model], limit: int) -> _Model:
    """Read and validate a JSON body; no body stands for ``{}`` where that is enough.

    Raises:
        WeightPushError: ``too_large``, or ``invalid_request`` with the first offending fields.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise WeightPushError(
                ErrorCode.TOO_LARGE, f"the body is larger than {limit} bytes", details={"limit_bytes": limit}
            )
    if not data and not any(field.is_required() for field in model.model_fields.values()):
        return model()
    try:
        if len(data) <= _SMALL_BODY_BYTES:
            return model.model_validate_json(bytes(data))
        return await asyncio.to_thread(model.model_validate_json, bytes(data))
    except ValidationError as error:
        offenders = [
            {"field": ".".join(map(str, problem["loc"])), "problem": problem["msg"]}
            for problem in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        first = "; ".join(f"{item['field'] or 'body'}: {item['problem']}" for item in offenders[:NAMED_OFFENDERS])
        raise WeightPushError(
            ErrorCode.INVALID_REQUEST,
            f"the body does not fit {model.__name__}: {first}",
            details={"problems": offenders[:NAMED_OFFENDERS], "total": len(offenders)},
        ) from None


@router.get("/status")
async def status(request: Request) -> Response:
    """State, version, progress and last error. 200 while the server serves, else 503 with the same body."""
    return _status_response(_context(request).coordinator.status())


@router.get("/manifest")
async def manifest(request: Request) -> Response:
    """Names, dtypes and shapes of the checkpoint that this server expects."""
    return _json(await _context(request).coordinator.manifest())


@router.post("/verify")
async def verify(request: Request) -> Response:
    """Whether the server still holds what was committed, and whether that is the checkpoint of the body."""
    context = _context(request)
    body = await _body(request, VerifyRequest, context.config.max_manifest_bytes)
    return _json(await context.coordinator.verify(body))


@router.post("/begin")
async def begin(request: Request) -> Response:
    """Open an update: check it, bring up the data plane, close the gate, drain, open the model."""
    context = _context(request)
    body = await _body(request, BeginRequest, context.config.max_manifest_bytes)
    check_bucket_sizes(body, context.config.max_bucket_bytes)
    return _json(await context.coordinator.begin(body))


def check_bucket_sizes(begin: BeginRequest, limit: int) -> None:
    """Refuse a plan whose buckets could not be sent: the trainer cuts them, and a body has a limit here.

    Raises:
        WeightPushError: ``too_large``.
    """
    largest = max((bucket.nbytes for bucket in begin.manifest.buckets), default=0)
    if begin.transport.name == "http" and largest > limit:
        raise WeightPushError(
            ErrorCode.TOO_LARGE,
            f"the plan has a bucket of {largest} bytes, and this server takes bodies of at most {limit}: push with "
            "smaller buckets (bucket_bytes, --bucket-mb), or start the server with a larger --max-bucket-mb",
            details={"largest_bytes": largest, "limit_bytes": limit},
        )


@router.post("/stream")
async def stream(request: Request) -> Response:
    """Announce a bucket (JSON), or bring it (any other content type: a safetensors file)."""
    context = _context(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        body = await _body(request, StreamRequest, context.config.max_manifest_bytes)
        return _json(await context.coordinator.announce(body))
    where = _stream_query(request)
    async with _spooled(request, context, where.update_id) as spool:
        return _json(
            await context.coordinator.land_body(where.update_id, where.epoch, where.bucket, where.call_id, spool)
        )


class _StreamQuery(BaseModel):
    update_id: str
    epoch: int | None = None
    bucket: int | None = None
    call_id: str | None = None


def _stream_query(request: Request) -> _StreamQuery:
    """Read where a body belongs. Without ``update_id`` it belongs to the update that runs (for curl)."""
    values: dict[str, Any] = dict(request.query_params)
    if "update_id" not in values:
        running = _context(request).shared.control().update
        if running is None:
            raise WeightPushError(ErrorCode.STALE_UPDATE, "no update is running; POST /reload/begin first")
        values["update_id"] = running.update_id
    try:
        return _StreamQuery.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise WeightPushError(
            ErrorCode.INVALID_REQUEST, f"query parameter {problem['loc'][0]}: {problem['msg']}"
        ) from None


@asynccontextmanager
async def _spooled(request: Request, context: ServerContext, update_id: str) -> AsyncIterator[Path]:
    """Keep a request body in a file in memory for as long as the workers need it. Bytes that arrive renew the lease."""
    path = context.config.spool_dir / uuid.uuid4().hex
    limit = context.config.max_bucket_bytes
    try:
        size = 0
        renewed = time.monotonic()
        with path.open("xb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if time.monotonic() - renewed > _RENEW_S:
                    context.coordinator.renew_lease(update_id)
                    renewed = time.monotonic()
                if size > limit:
                    raise WeightPushError(
                        ErrorCode.TOO_LARGE,
                        f"the bucket is larger than {limit} bytes; send smaller buckets",
                        details={"limit_bytes": limit},
                    )
                file.write(chunk)
        yield path
    finally:
        path.unlink(missing_ok=True)


@router.post("/finish")
async def finish(request: Request) -> Response:
    """Post-process, prove, reset caches, publish the version, serve."""
    context = _context(request)
    body = await _body(request, FinishRequest, _SMALL_BODY_BYTES)
    return _json(await context.coordinator.finish(body))


@router.post("")
async def load(request: Request) -> Response:
    """Load a checkpoint directory from below a ``--reload-root``: a whole update in one call."""
    context = _context(request)
    body = await _body(request, DiskReloadRequest, context.config.max_manifest_bytes)
    return _json(await context.coordinator.load(body))


@router.post("/rollback")
async def rollback(request: Request) -> Response:
    """Go back to the weights of before, of which the server keeps a copy."""
    context = _context(request)
    body = await _body(request, RollbackRequest, _SMALL_BODY_BYTES)
    return _json(await context.coordinator.rollback(body))


@router.post("/abort")
async def abort(request: Request) -> Response:
    """End the update."""
    context = _context(request)
    body = await _body(request, AbortRequest, _SMALL_BODY_BYTES)
    return _json(await context.coordinator.abort(body))


@router.get("/events")
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
