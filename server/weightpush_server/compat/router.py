"""vLLM's weight-transfer routes, with its bodies, answers and shape of errors."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from weightpush_protocol.errors import ErrorBody, ErrorCode, WeightPushError
from weightpush_server.bodies import MANIFEST_BODY_S, SMALL_BODY_BYTES, SMALL_BODY_S, read_json, read_query
from weightpush_server.compat.calls import VllmCalls, server_facts
from weightpush_server.compat.messages import (
    CacheQuery,
    FinishRequest,
    InitRequest,
    PauseQuery,
    StartRequest,
    UpdateRequest,
    VersionRequest,
    WorldQuery,
)
from weightpush_server.error_route import ErrorRoute
from weightpush_server.openapi import json_body, query

_Model = TypeVar("_Model", bound=BaseModel)


class VllmErrorDetail(BaseModel):
    """What went wrong, as vLLM words it. ``type``: our stable code; ``code``: the HTTP status once more."""

    message: str
    type: str
    param: str | None = None
    code: int


class VllmError(BaseModel):
    """``{"error": {...}}``."""

    error: VllmErrorDetail


#: Clients of vLLM's kind repeat calls that are answered 500, 502 or 503, and none of these may be made twice.
_NOT_AGAIN: Final = 409
#: Answered before it is known whose client asks, so in our own shape.
_AT_THE_DOOR: Final = frozenset({401, 429})
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody if status in _AT_THE_DOOR else VllmError, "description": text}
    for status, text in {
        401: "no or wrong control token",
        408: "the body did not come in time",
        409: "a conflict, a failed update, or a fault of the server",
        413: "over a limit",
        422: "refused before anything was changed",
        429: "too many control calls at the same time",
    }.items()
}


class _VllmErrorRoute(ErrorRoute):
    """Answers every error in vLLM's shape."""

    @staticmethod
    def answer(error: WeightPushError) -> Response:
        status = error.http_status if error.http_status < 500 else _NOT_AGAIN
        detail = VllmErrorDetail(message=error.message, type=error.code.value, code=status)
        # What comes late is not waited for.
        headers = {"Connection": "close"} if error.code is ErrorCode.SLOW_BODY else None
        return JSONResponse(VllmError(error=detail).model_dump(), status_code=status, headers=headers)


router = APIRouter(tags=["weightpush: vLLM's weight-transfer routes"], route_class=_VllmErrorRoute, responses=_ERRORS)


def _calls(request: Request) -> VllmCalls:
    calls: VllmCalls = request.app.state.weightpush.vllm_calls
    return calls


async def _small_body(request: Request, model: type[_Model]) -> _Model:
    return await read_json(request, model, limit=SMALL_BODY_BYTES, within_s=SMALL_BODY_S)


@router.get("/get_world_size", openapi_extra={"parameters": query(WorldQuery)})
async def get_world_size(request: Request) -> dict[str, int]:
    """Number of workers: what a trainer's group needs beside the trainer."""
    asked = read_query(request.query_params, WorldQuery)
    return {"world_size": _calls(request).world_size(include_dp=asked.include_dp)}


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """What clients read of vLLM's configuration, and no more of it."""
    return {"vllm_config": server_facts(_calls(request).vllm_config)}


@router.post("/init_weight_transfer_engine", openapi_extra=json_body(InitRequest))
async def init_weight_transfer_engine(request: Request) -> dict[str, str]:
    """Join the trainer's group with all workers, while the trainer enters it."""
    calls = _calls(request)
    await calls.rounds.join((await _small_body(request, InitRequest)).init_info)
    return {"message": "Weight transfer initialized"}


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(request: Request) -> dict[str, str]:
    """Leave the trainer's group."""
    await _calls(request).rounds.leave()
    return {"message": "Weight transfer shut down"}


@router.post("/start_weight_update", openapi_extra=json_body(StartRequest))
async def start_weight_update(request: Request) -> dict[str, str]:
    """Begin an update; the old weights serve on until its end."""
    calls = _calls(request)
    if not (await _small_body(request, StartRequest)).is_checkpoint_format:
        raise WeightPushError(
            ErrorCode.RELOAD_REFUSED,
            "weights in vLLM's own runtime format cannot be proven whole: send them as a checkpoint holds them",
        )
    await calls.rounds.start()
    return {"message": "Weight update started"}


@router.post("/start_draft_weight_update")
async def start_draft_weight_update(request: Request) -> dict[str, str]:
    """Refused: a draft model keeps the weights that the server was started with."""
    raise WeightPushError(
        ErrorCode.RELOAD_REFUSED,
        "a draft model is not updated here, only the model that it drafts for: answers stay right, and fewer drafted "
        "tokens are taken. Restart the server to exchange the draft",
    )


@router.post("/update_weights", openapi_extra=json_body(UpdateRequest))
async def update_weights(request: Request) -> dict[str, str]:
    """Take part in the trainer's broadcast of these tensors."""
    calls = _calls(request)
    limit = request.app.state.weightpush.config.max_manifest_bytes
    try:
        body = await read_json(request, UpdateRequest, limit=limit, within_s=MANIFEST_BODY_S)
    except WeightPushError as error:
        await calls.rounds.hang_up(error)
        raise
    await calls.rounds.receive(body.info)
    return {"message": "Weights updated"}


@router.post("/finish_weight_update", openapi_extra=json_body(FinishRequest))
async def finish_weight_update(request: Request) -> dict[str, str]:
    """Check that the whole checkpoint has come, land it, prove it, and publish the version."""
    calls = _calls(request)
    await calls.rounds.finish((await _small_body(request, FinishRequest)).weight_version)
    return {"message": "Weight update finished"}


@router.post("/pause", openapi_extra={"parameters": query(PauseQuery)})
async def pause(request: Request) -> dict[str, str]:
    """Hold requests that come, and end, freeze or await those that run."""
    await _calls(request).holding.pause(read_query(request.query_params, PauseQuery).mode)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    """End a pause. Opens nothing that an update has closed."""
    await _calls(request).holding.resume()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Whether requests are not answered now, by a pause or by an update."""
    return {"is_paused": _calls(request).holding.paused}


@router.post("/reset_prefix_cache", openapi_extra={"parameters": query(CacheQuery)})
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Empty the prefix cache. Every update has done so before its version was published."""
    asked = read_query(request.query_params, CacheQuery)
    calls = _calls(request)
    return {
        "success": await calls.engine.reset_prefix_cache(
            running=asked.reset_running_requests, connector=asked.reset_external
        )
    }


@router.get("/weight_info")
async def weight_info(request: Request) -> dict[str, str]:
    """The version of the weights that were committed last."""
    return {"weight_version": _calls(request).weight_version}


@router.post("/update_weight_version", openapi_extra=json_body(VersionRequest))
async def update_weight_version(request: Request) -> dict[str, Any]:
    """Name the weights that are served, or those of the update that is open."""
    calls = _calls(request)
    version = (await _small_body(request, VersionRequest)).new_version
    await calls.rounds.relabel(version)
    return {"success": True, "new_version": version}


#: Every path here is a control route: the gate asks for the token.
VLLM_PATHS: Final = frozenset(route.path for route in router.routes if isinstance(route, APIRoute))
