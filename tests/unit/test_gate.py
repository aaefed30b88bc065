"""The gate and the credentials, around a small application in one process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from unit.test_shared_state import make_update
from weightpush_protocol.messages import InFlight
from weightpush_protocol.state import ServerState
from weightpush_server import gate, held_bodies
from weightpush_server.cross_origin import CrossOrigin
from weightpush_server.gate import MAX_CONTROL_CALLS, Gate, WeightPushMiddleware, is_control_path, is_gated
from weightpush_server.held_bodies import HeldBody, Room
from weightpush_server.records import ControlRecord
from weightpush_server.shared_state import SharedState
from weightpush_server.tokens import TokenFile, write_private

TOKEN = "correct-horse-battery"


@dataclass
class Context:
    gate: Gate
    tokens: TokenFile | None
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    vllm_paths: frozenset[str] = frozenset()
    vllm_open: bool = False


class App:
    """A server with one slow route, one streaming route and stand-ins of the control routes."""

    def __init__(self, folder: Path) -> None:
        control = ControlRecord(instance_id="i", weight_version="v0")
        self.shared = SharedState.create(folder / "state", workers=1, control=control)
        self.release = asyncio.Event()
        self.calls = 0
        self.bodies: list[bytes] = []
        routes = [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/stream", self.stream, methods=["POST"]),
            Route("/v1/models", self.plain),
            Route("/reload/status", self.plain, methods=["GET", "POST"]),
            Route("/reload/begin", self.generate, methods=["POST"]),
            Route("/reload/abort", self.plain, methods=["POST"]),
            Route("/pause", self.plain, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        write_private(folder / "token", TOKEN)
        self.app.state.weightpush = Context(Gate(self.shared), TokenFile(folder / "token"))
        self.app.add_middleware(WeightPushMiddleware)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://server")

    async def generate(self, request: Request) -> PlainTextResponse:
        self.calls += 1
        self.bodies.append(await request.body())
        if request.query_params.get("wait"):
            await self.release.wait()
        return PlainTextResponse("text")

    async def stream(self, request: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "a"
            await self.release.wait()
            yield "b"

        return StreamingResponse(parts())

    async def plain(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    def set_state(self, state: ServerState, **changes: Any) -> None:
        with self.shared.transaction() as control:
            control.state = state
            for name, value in changes.items():
                setattr(control, name, value)

    async def until_in_flight(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.shared.in_flight() != count:  # noqa: ASYNC110 - a file in memory rings no bell
                await asyncio.sleep(0.005)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    server = App(tmp_path)
    yield server
    await server.client.aclose()


async def test_answers_carry_the_version_and_are_counted(app: App) -> None:
    answer = await app.client.post("/v1/completions")
    assert (answer.status_code, answer.headers["X-Weight-Version"]) == (200, "v0")
    assert app.shared.in_flight() == 0
    waiting = asyncio.create_task(app.client.post("/v1/completions?wait=1"))
    await app.until_in_flight(1)
    app.release.set()
    assert (await waiting).text == "text"
    assert app.shared.in_flight() == 0


@pytest.mark.case("C3", "C11")
@pytest.mark.parametrize("state", [ServerState.UPDATING, ServerState.FAILED, ServerState.AWAITING_WEIGHTS])
async def test_the_closed_gate_refuses_without_calling_the_model(app: App, state: ServerState) -> None:
    updating = state is ServerState.UPDATING
    app.set_state(state, update=make_update() if updating else None)
    for path in ("/v1/completions", "/stream", "/invocations", "/route/of/tomorrow"):
        answer = await app.client.post(path)
        assert answer.status_code == 503, path
        assert answer.json()["error"]["code"] == "not_serving"
        assert answer.json()["error"]["state"] == state.value
        assert ("Retry-After" in answer.headers) is updating
        assert "X-Weight-Version" not in answer.headers
    assert app.calls == 0
    assert (await app.client.get("/v1/models")).status_code == 200
    assert (await app.client.get("/reload/status")).status_code == 200
    assert app.shared.in_flight() == 0


async def test_a_request_that_is_evicted_before_its_answer_gets_503(app: App) -> None:
    waiting = asyncio.create_task(app.client.post("/v1/completions?wait=1"))
    await app.until_in_flight(1)
    app.set_state(ServerState.UPDATING, update=make_update())
    app.app.state.weightpush.gate.evict()
    answer = await waiting
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert app.shared.in_flight() == 0


async def test_a_stream_that_is_evicted_ends_and_is_no_longer_counted(app: App) -> None:
    waiting = asyncio.create_task(app.client.post("/stream"))
    await app.until_in_flight(1)
    await asyncio.sleep(0.05)
    app.app.state.weightpush.gate.evict()
    # The transport of this client has no notion of a cut connection; what counts is that the request is gone.
    (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    assert not isinstance(outcome, httpx.Response) or outcome.text == "a"
    assert app.shared.in_flight() == 0


@pytest.mark.case("C86")
async def test_only_a_kept_request_says_both_versions(app: App) -> None:
    for kept, label in (([], "v0"), ([(1, "v1")], "v0, v1")):
        app.set_state(ServerState.SERVING, weight_version="v0", kept=[], epoch=0)
        app.release.clear()
        waiting = asyncio.create_task(app.client.post("/v1/completions?wait=1"))
        await app.until_in_flight(1)
        app.set_state(ServerState.UPDATING, update=make_update(in_flight=InFlight.KEEP))
        app.set_state(ServerState.SERVING, weight_version="v1", kept=kept, epoch=1, update=None)
        app.release.set()
        assert (await waiting).headers["X-Weight-Version"] == label


class Dialogue:
    """A request whose body comes as the test says, and what was answered."""

    def __init__(self, app: App) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answers: list[dict[str, Any]] = []
        scope = {
            **{"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"},
            **{"query_string": b"", "root_path": "", "headers": [], "http_version": "1.1", "scheme": "http"},
        }

        async def send(message: Any) -> None:
            self.answers.append(message)

        self.task = asyncio.ensure_future(app.app(scope, self.messages.get, send))

    def body(self, text: bytes, *, more: bool) -> None:
        self.messages.put_nowait({"type": "http.request", "body": text, "more_body": more})

    @property
    def status(self) -> int | None:
        return self.answers[0]["status"] if self.answers else None

    @property
    def code(self) -> str:
        return str(json.loads(self.answers[1]["body"])["error"]["code"])

    @property
    def label(self) -> str | None:
        return dict(self.answers[0]["headers"]).get(b"x-weight-version", b"").decode() or None


async def test_a_request_counts_once_its_body_is_there(app: App) -> None:
    slow = Dialogue(app)
    slow.body(b"{", more=True)
    await asyncio.sleep(0.05)
    assert (app.shared.in_flight(), app.calls, slow.status) == (0, 0, None)
    slow.body(b'"prompt": "x"}', more=False)
    await slow.task
    assert (app.calls, slow.status, slow.label) == (1, 200, "v0")
    assert app.bodies == [b'{"prompt": "x"}']
    assert app.shared.in_flight() == 0


async def test_a_body_that_ends_behind_the_closed_gate_is_refused_and_one_after_it_is_of_the_new_version(
    app: App,
) -> None:
    early, late = Dialogue(app), Dialogue(app)
    for request in (early, late):
        request.body(b"{", more=True)
    await asyncio.sleep(0.02)
    app.set_state(ServerState.UPDATING, update=make_update())
    early.body(b"}", more=False)
    await early.task
    assert (early.status, app.calls) == (503, 0)
    app.set_state(ServerState.SERVING, weight_version="v1", epoch=1, update=None)
    late.body(b"}", more=False)
    await late.task
    assert (late.status, late.label, app.calls) == (200, "v1", 1)


async def test_a_client_that_leaves_in_its_body_leaves_nothing(app: App) -> None:
    gone = Dialogue(app)
    gone.body(b"{", more=True)
    gone.messages.put_nowait({"type": "http.disconnect"})
    await gone.task
    assert (gone.answers, app.calls, app.shared.in_flight()) == ([], 0, 0)


@pytest.mark.parametrize("alone", [True, False])
async def test_a_body_without_room_counts_from_then_on(app: App, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is too large itself, or other bodies take the room."""
    room = app.app.state.weightpush.gate.room
    monkeypatch.setattr(held_bodies, "HELD_BYTES" if alone else "ROOM_BYTES", 1000)
    others = [] if alone else [Dialogue(app) for _ in range(3)]
    for other in others:
        other.body(b"o" * 300, more=True)
    large = Dialogue(app)
    large.body(b"a" * 600, more=True)
    if alone:
        large.body(b"b" * 600, more=True)
    await app.until_in_flight(1)
    async with asyncio.timeout(5):
        while room.taken != 300 * len(others):  # noqa: ASYNC110 - handed on, it is held no more
            await asyncio.sleep(0.005)
    large.body(b"c", more=False)
    await large.task
    assert app.bodies == [b"a" * 600 + b"b" * 600 * alone + b"c"]
    assert (large.status, large.label, app.shared.in_flight()) == (200, "v0", 0)
    for other in others:
        other.messages.put_nowait({"type": "http.disconnect"})
        await other.task
    assert room.taken == 0


async def test_a_large_body_behind_the_closed_gate_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bodies, "HELD_BYTES", 1000)
    large = Dialogue(app)
    large.body(b"a" * 600, more=True)
    await asyncio.sleep(0.02)
    app.set_state(ServerState.UPDATING, update=make_update())
    large.body(b"a" * 600, more=True)
    await large.task
    assert (large.status, app.calls, app.shared.in_flight()) == (503, 0, 0)
    assert app.app.state.weightpush.gate.room.taken == 0


async def test_without_a_key_no_more_than_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own check of keys comes after ours, and before it reads a body."""
    monkeypatch.setattr(held_bodies, "HELD_BYTES", 100_000)
    server = App(tmp_path)
    inner = Starlette(routes=[Route("/v1/completions", server.generate, methods=["POST"])])
    inner.state.weightpush = server.app.state.weightpush
    inner.add_middleware(AuthenticationMiddleware, tokens=["key"])
    inner.add_middleware(WeightPushMiddleware)
    server.app = inner
    stranger = Dialogue(server)
    for _ in range(100):
        stranger.body(b"x" * 10_000, more=True)
    await stranger.task
    assert (stranger.status, server.calls, server.shared.in_flight()) == (401, 0, 0)
    assert stranger.messages.qsize() == 100 - 11
    assert inner.state.weightpush.gate.room.taken == 0


@pytest.mark.parametrize("held", [True, False])
async def test_a_body_that_does_not_come_is_answered_and_let_go(
    app: App, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bodies, "BODY_S", 0.3)
    monkeypatch.setattr(held_bodies, "HELD_BYTES", 1000 if held else 10)
    slow = Dialogue(app)
    slow.body(b"x" * 100, more=True)
    if not held:
        await app.until_in_flight(1)
    async with asyncio.timeout(10):
        await slow.task
    assert (slow.status, slow.code) == (408, "slow_body")
    assert dict(slow.answers[0]["headers"])[b"connection"] == b"close"
    assert (app.bodies, app.shared.in_flight()) == ([], 0)
    assert app.app.state.weightpush.gate.room.taken == 0


async def test_bytes_earn_a_body_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bodies, "BODY_S", 0.2)
    monkeypatch.setattr(held_bodies, "SLOWEST_BYTES_PER_S", 1)
    came = 0

    async def receive() -> dict[str, Any]:
        nonlocal came
        came += 1
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b"x" * 60, "more_body": came < 6}

    assert await HeldBody(receive, Room()).hold()  # In 0.6 s, which only its bytes have earned.


async def test_control_calls_are_bounded_but_looking_and_aborting_are_not(app: App) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    waiting = [
        asyncio.create_task(app.client.post("/reload/begin?wait=1", headers=headers)) for _ in range(MAX_CONTROL_CALLS)
    ]
    async with asyncio.timeout(5):
        while app.calls < MAX_CONTROL_CALLS:  # noqa: ASYNC110 - the application rings no bell
            await asyncio.sleep(0.01)
    crowded = await app.client.post("/reload/begin", headers=headers)
    assert (crowded.status_code, crowded.json()["error"]["code"]) == (429, "too_many_calls")
    assert (await app.client.post("/reload/begin")).status_code == 401
    assert (await app.client.post("/reload/abort", headers=headers)).status_code == 200
    assert (await app.client.get("/reload/status")).status_code == 200
    app.release.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    assert (await app.client.post("/reload/begin", headers=headers)).status_code == 200


@pytest.mark.case("C24", "C25")
@pytest.mark.parametrize(
    "path",
    [
        *("/reload/begin", "/reload/begin/", "//reload/begin", "/RELOAD/begin", "/reload/begin?x=1", "/reload"),
        *("/reload/", "/./reload/begin", "/%72eload/begin", "/reload/nothing", "/reload/status/", "/reload//status"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
async def test_every_spelling_of_a_control_route_needs_the_token(app: App, path: str, method: str) -> None:
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}]
    wrong += [{"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer "}, {"X-API-Key": TOKEN}]
    for headers in wrong:
        answer = await app.client.request(method, httpx.URL("http://server" + path), headers=headers)
        assert answer.status_code == 401, headers
        if method != "HEAD":
            assert answer.json()["error"]["code"] == "unauthorized"
            assert TOKEN not in answer.text
    answer = await app.client.request(method, "http://server" + path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code != 401


@pytest.mark.case("C24")
async def test_the_status_alone_is_open_and_only_to_read(app: App) -> None:
    assert (await app.client.get("/reload/status")).status_code == 200
    assert (await app.client.post("/reload/status")).status_code == 401
    assert (await app.client.head("/reload/status")).status_code == 401


async def test_without_a_token_nothing_is_asked_for(app: App) -> None:
    app.app.state.weightpush.tokens = None
    assert (await app.client.post("/reload/begin")).status_code == 200


def test_control_paths_are_recognised_below_a_root_path_too() -> None:
    assert is_control_path("/reload")
    assert is_control_path("//Reload/x")
    assert not is_control_path("/v1/reload")
    assert not is_control_path("/reloaded")
    assert not is_control_path("/")


@pytest.mark.case("C84")
def test_what_is_unknown_is_gated() -> None:
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("HEAD", "/health"), ("POST", "/tokenize")):
        assert not is_gated(method, path)
    for method, path in (("POST", "/invocations"), ("POST", "/v1/completions"), ("GET", "/new"), ("POST", "/health")):
        assert is_gated(method, path)
    assert is_gated("WEBSOCKET", "/v1/realtime")


async def test_while_a_trainer_pauses_the_server_requests_wait_outside(app: App) -> None:
    app.set_state(ServerState.SERVING, held=InFlight.KEEP)
    waiting = [asyncio.create_task(app.client.post("/v1/completions")) for _ in range(3)]
    await asyncio.sleep(0.2)
    # Neither refused nor inside: an update of the paused server has nothing to wait for.
    assert (app.calls, app.shared.in_flight(), [task.done() for task in waiting]) == (0, 0, [False] * 3)
    app.set_state(ServerState.UPDATING, update=make_update())
    await asyncio.sleep(0.2)
    app.set_state(ServerState.SERVING, update=None, weight_version="v1")
    await asyncio.sleep(0.2)
    assert app.calls == 0
    app.set_state(ServerState.SERVING, held=None)
    assert [((await task).status_code, (await task).headers["X-Weight-Version"]) for task in waiting] == [
        (200, "v1")
    ] * 3


async def test_who_waits_for_a_trainer_is_refused_when_its_update_fails(app: App) -> None:
    app.set_state(ServerState.SERVING, held=InFlight.ABORT)
    waiting = asyncio.create_task(app.client.post("/v1/completions"))
    await asyncio.sleep(0.1)
    app.set_state(ServerState.FAILED)
    assert (await waiting).status_code == 503
    # Nor does the end of a pause open anything.
    app.set_state(ServerState.FAILED, held=None)
    assert (await app.client.post("/v1/completions")).status_code == 503
    assert app.calls == 0


async def test_nobody_waits_for_ever(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HELD_S", 0.1)
    app.set_state(ServerState.SERVING, held=InFlight.KEEP)
    answer = await app.client.post("/v1/completions")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "/resume" in answer.json()["error"]["message"]


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"trainer:{password}".encode()).decode()}


@pytest.mark.case("C24")
async def test_routes_of_vllm_that_are_served_are_control_routes(app: App) -> None:
    context = app.app.state.weightpush
    context.vllm_paths = frozenset({"/pause"})
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for good in (bearer, basic(TOKEN)):
        assert (await app.client.post("/pause", headers=good)).status_code == 200
    for bad in ({}, basic("wrong"), basic(""), {"Authorization": "Basic %%%"}, {"Authorization": TOKEN}):
        for path in ("/pause", "//pause", "/PAUSE", "/./pause/", "/pause/"):
            answer = await app.client.post(f"http://server{path}", headers=bad)
            assert answer.status_code == 401, (path, bad)
    # They answer while the server does not serve; a password opens nothing else.
    app.set_state(ServerState.FAILED)
    assert (await app.client.post("/pause", headers=bearer)).status_code == 200
    assert (await app.client.post("/reload/begin", headers=basic(TOKEN))).status_code == 401


@pytest.mark.case("C24")
async def test_routes_of_vllm_may_stand_open_but_not_to_pages_in_a_browser(app: App) -> None:
    context = app.app.state.weightpush
    context.vllm_paths, context.vllm_open = frozenset({"/pause"}), True
    assert (await app.client.post("/pause")).status_code == 200
    page = {"Origin": "http://evil.example"}
    assert (await app.client.post("/pause", headers=page)).status_code == 401
    assert (await app.client.post("/pause", headers={**page, **basic(TOKEN)})).status_code == 200
    assert (await app.client.post("/reload/begin")).status_code == 401
