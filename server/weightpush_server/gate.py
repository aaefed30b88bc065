"""The outermost ASGI layer: credentials before every control route, the gate before every route that uses the model.

Deny by default on both sides: a path that looks like a control route in any spelling needs the token, and a path that
is not known to leave the model alone is shut while the server does not serve.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import VERSION_HEADER
from weightpush_server.held_bodies import HeldBody, Room
from weightpush_server.records import ControlRecord
from weightpush_server.shared_state import SharedState
from weightpush_server.tokens import TokenFile

if TYPE_CHECKING:
    from weightpush_server.context import ServerContext

#: Seconds after which a refused client should ask again; sent only while an update runs.
RETRY_AFTER_S: Final = 1
#: Seconds that a request waits while a trainer pauses the server.
HELD_S: Final = 300.0
_HELD_LOOK_S: Final = 0.05
STATUS_PATH: Final = "/reload/status"
#: Control calls that one API process answers at the same time, streams of events included.
MAX_CONTROL_CALLS: Final = 64
#: Not counted there, so that whoever looks, keeps an update or ends it gets through.
_ALWAYS_ANSWERED: Final = frozenset({("GET", STATUS_PATH), ("POST", "/reload/keep"), ("POST", "/reload/abort")})

# Routes of vLLM that never run the model and never change it; everything else is gated, also routes that a later vLLM
# or another plugin adds.
_UNGATED: Final = frozenset(
    {
        *(("GET", path) for path in ("/health", "/ping", "/version", "/load", "/v1/models", "/tokenizer_info")),
        *(("GET", path) for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/kv_event_sources")),
        *(("GET", path) for path in ("/fault_tolerance/status",)),
        *(("POST", path) for path in ("/ping", "/tokenize", "/detokenize", "/is_scaling_elastic_ep")),
        *(("POST", path) for path in ("/abort_requests", "/inference/v1/abort_requests", "/v1/messages/count_tokens")),
        *(("POST", path) for path in ("/start_profile", "/stop_profile")),
    }
)
_UNGATED_PATTERNS: Final = (
    ("GET", re.compile(r"/metrics(/.*)?")),
    ("GET", re.compile(r"/static/.*")),
    ("GET", re.compile(r"/v1/models/.+")),
    ("GET", re.compile(r"/v1/responses/[^/]+")),  # A stored answer of an earlier request.
    ("POST", re.compile(r"/v1/responses/[^/]+/cancel")),
    ("POST", re.compile(r"/(v1|cohere/v2)/.+/(render|derender)")),
)


def route_path(scope: Scope) -> str:
    """Return the path below the application's root path, as the router will see it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path or "/"


def is_control_path(path: str, vllm_paths: Collection[str] = ()) -> bool:
    """Whether ``path`` is a control route in any spelling: ``//reload``, ``/RELOAD/``, ``/./reload``.

    ``vllm_paths``: those of vLLM's own control routes that are served.
    """
    return _plain(path).split("/")[1] == "reload" or _plain(path) in vllm_paths


def _plain(path: str) -> str:
    return "/" + "/".join(segment for segment in path.lower().split("/") if segment not in ("", "."))


def is_gated(method: str, path: str) -> bool:
    """Whether a request must wait for whole weights."""
    if method == "OPTIONS":  # CORS preflight.
        return False
    method = "GET" if method == "HEAD" else method
    if (method, path) in _UNGATED:
        return False
    return not any(method == verb and pattern.fullmatch(path) for verb, pattern in _UNGATED_PATTERNS)


def token_matches(headers: Headers, tokens: TokenFile, *, basic: bool = False) -> bool:
    """Whether a request brings one of the tokens, as a bearer; or, with ``basic``, as the password of any user."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if basic and scheme.lower() == "basic":
        return tokens.accepts(_password(given.strip()))
    return tokens.accepts(given.strip()) and scheme.lower() == "bearer"


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def refusal(control: ControlRecord) -> JSONResponse:
    """Return the 503 of the closed gate."""
    error = WeightPushError(
        ErrorCode.NOT_SERVING,
        f"the server is {control.state.value}: its weights are being replaced"
        if control.update is not None
        else _why_closed(control),
        update_id=control.update.update_id if control.update is not None else None,
        state=control.state,
    )
    passes = control.update is not None or control.held is not None
    headers = {"Retry-After": str(RETRY_AFTER_S)} if passes else None
    return JSONResponse(error.body().model_dump(mode="json"), status_code=error.http_status, headers=headers)


def _why_closed(control: ControlRecord) -> str:
    if control.state.serving:
        return "the server is paused by its trainer (/pause): it goes on with /resume"
    return f"the server is {control.state.value}: it needs a complete push; see {STATUS_PATH}"


class Gate:
    """Counts what it lets through, so that nothing waits in limbo between HTTP and the engine."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._index = shared.claim_counter()
        self._inside: set[_GatedExchange] = set()
        #: Of the bodies that come before their requests are let in.
        self.room = Room()
        self._resuming: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        """Whether a request that comes now would be let in, at once or when a pause ends."""
        control = self._shared.control()
        return control.gate_open or control.waits_for_resume

    async def resumed(self) -> bool:
        """Wait for the end of a pause, if there is one; return whether it is worth trying to enter again."""
        if not self._shared.control().waits_for_resume:
            return False
        if self._resuming is None or self._resuming.done():
            self._resuming = asyncio.create_task(self._until_resumed())  # One looks for all.
        await asyncio.wait({self._resuming}, timeout=HELD_S)
        return self._resuming.done()

    async def _until_resumed(self) -> None:
        while True:
            if not self._shared.control().waits_for_resume:
                return
            await asyncio.sleep(_HELD_LOOK_S)

    def enter(self, exchange: _GatedExchange) -> ControlRecord | None:
        """Let a request in and return the record it came in under, or ``None`` if the gate is closed."""
        # Count first, look second: whoever closes the gate and then reads the counters must see this request.
        self._inside.add(exchange)
        self._shared.set_in_flight(self._index, len(self._inside))
        control = self._shared.control()
        if control.gate_open:
            return control
        self.leave(exchange)
        return None

    def leave(self, exchange: _GatedExchange) -> None:
        """Note that a request has ended."""
        self._inside.discard(exchange)
        self._shared.set_in_flight(self._index, len(self._inside))

    def refused(self, control: ControlRecord) -> None:
        """Count a request that is answered 503 under ``control``."""
        self._shared.count_refusal(self._index, control.state)

    def evict(self) -> None:
        """End every request of this process that is still inside."""
        for exchange in list(self._inside):
            exchange.evict()

    def control(self) -> ControlRecord:
        """Return the control record as it is now."""
        return self._shared.control()


@dataclass(eq=False)
class _GatedExchange:
    """One request that uses the model."""

    gate: Gate
    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    entered: ControlRecord | None = None
    started: bool = False
    evicted: bool = False
    late: WeightPushError | None = None
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        if not self.gate.open:
            await self.refuse()
            return
        if self.scope["type"] != "http":
            await self._enter()
            return
        # Before it is counted: whoever sends a body slowly would hold up every update. The application cannot have
        # begun with it. A body that is too large to be held counts from then on, while its rest comes.
        body = HeldBody(self.receive, self.gate.room)
        try:
            if not await body.hold():
                return
            self.receive = self._in_time(body)
            await self._enter()
        except WeightPushError as error:
            if self.entered is not None:  # The application's own.
                raise
            await _closing(error)(self.scope, self.receive, self.send)
        finally:
            body.release()

    def _in_time(self, body: HeldBody) -> Receive:
        """Return a ``receive`` for the application that ends the request when its body does not come."""

        async def receive() -> Message:
            try:
                return await body.receive()
            except WeightPushError as error:
                self.late = error
            assert self.task is not None
            self.task.cancel()  # It may wait for this in a task of its own.
            raise asyncio.CancelledError

        return receive

    async def _enter(self) -> None:
        self.entered = self.gate.enter(self)
        while self.entered is None and await self.gate.resumed():
            self.entered = self.gate.enter(self)
        if self.entered is None:
            await self.refuse()
            return
        try:
            # A task of its own, so that eviction can end it without ending the server's task.
            self.task = asyncio.ensure_future(self._call_app())
            await self.task
        except asyncio.CancelledError:
            if not self.evicted and self.late is None:
                if self.task is not None:
                    self.task.cancel()
                raise
            if self.started:
                return
            if self.evicted or self.late is None:
                await self.refuse()
            else:
                await _closing(self.late)(self.scope, self.receive, self.send)
        finally:
            self.gate.leave(self)

    async def _call_app(self) -> None:
        await self.app(self.scope, self.receive, self.labelled_send)

    async def labelled_send(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            self.started = True
            MutableHeaders(scope=message)[VERSION_HEADER] = self.label()
        await self.send(message)

    def label(self) -> str:
        """Return the weight version that computed the answer, or both where the request was kept across an update."""
        assert self.entered is not None
        return self.gate.control().label(
            entered_epoch=self.entered.committed_epoch, entered_version=self.entered.weight_version
        )

    async def refuse(self) -> None:
        control = self.gate.control()
        self.gate.refused(control)
        await refusal(control)(self.scope, self.receive, self.send)

    def evict(self) -> None:
        self.evicted = True
        if self.task is not None:
            self.task.cancel()


class WeightPushMiddleware:
    """Put before vLLM's application with ``--middleware``; finds its server in ``app.state.weightpush``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._control_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check credentials and the gate, then call the application."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        context: ServerContext = scope["app"].state.weightpush
        method = scope.get("method", "WEBSOCKET")
        path = route_path(scope)
        if any(is_control_path(name, context.vllm_paths) for name in (path, scope["path"])):
            headers = Headers(scope=scope)
            if not self._allowed(context, method, path, headers):
                await _unauthorized("authorization" in headers)(scope, receive, send)
                return
            if (method, path) in _ALWAYS_ANSWERED:
                await self.app(scope, receive, send)
                return
            if self._control_calls >= MAX_CONTROL_CALLS:
                await _crowded()(scope, receive, send)
                return
            self._control_calls += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self._control_calls -= 1
        elif is_gated(method, path):
            await _GatedExchange(context.gate, self.app, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)

    @staticmethod
    def _allowed(context: ServerContext, method: str, path: str, headers: Headers) -> bool:
        if context.tokens is None or (method == "GET" and path == STATUS_PATH):
            return True
        if _plain(path) not in context.vllm_paths:
            return token_matches(headers, context.tokens)
        # A page in a browser on this machine sends an origin; the clients that this door is for send none.
        if context.vllm_open and "origin" not in headers:
            return True
        return token_matches(headers, context.tokens, basic=True)


def _closing(error: WeightPushError) -> JSONResponse:
    """Return the answer to a body that does not come; its connection is of no more use."""
    body = error.body().model_dump(mode="json")
    return JSONResponse(body, status_code=error.http_status, headers={"Connection": "close"})


def _crowded() -> JSONResponse:
    message = f"{MAX_CONTROL_CALLS} control calls are being answered already (streams of events count too)"
    error = WeightPushError(ErrorCode.TOO_MANY_CALLS, message, details={"limit": MAX_CONTROL_CALLS})
    return JSONResponse(error.body().model_dump(mode="json"), status_code=error.http_status)


def _unauthorized(brought_some: bool) -> JSONResponse:
    what = "these are not the credentials of" if brought_some else "no credentials came for"
    message = f"{what} this server's control routes: send its control token as 'Authorization: Bearer <token>'"
    error = WeightPushError(ErrorCode.UNAUTHORIZED, message)
    return JSONResponse(error.body().model_dump(mode="json"), status_code=401, headers={"WWW-Authenticate": "Bearer"})
