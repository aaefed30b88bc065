"""Limits of request bodies, with an application in one process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import AbortRequest, BeginRequest
from weightpush_server.bodies import Spool, SpoolFile, read_json, spooled


class App:
    """Reads JSON at ``/json``, a bucket at ``/bucket``; says what became of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spool = Spool(folder, 1000)
        self.model: Any = AbortRequest
        self.arrived = 0
        self.seen: list[bytes] = []
        self.hold = asyncio.Event()
        self.hold.set()
        app = Starlette(routes=[Route(f"/{name}", self.serve, methods=["POST"]) for name in ("json", "bucket")])
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")

    def note(self) -> None:
        self.arrived += 1

    async def serve(self, request: Request) -> JSONResponse:
        try:
            if request.url.path == "/json":
                model = await read_json(request, self.model, limit=1000, within_s=0.3)
                return JSONResponse(model.model_dump(mode="json"))
            async with spooled(request, self.spool, limit=600, within_s=0.3, arriving=self.note) as path:
                self.seen.append(path.read_bytes())
                await self.hold.wait()
            return JSONResponse({})
        except WeightPushError as error:
            return JSONResponse(error.body().model_dump(mode="json"), error.http_status)

    async def code(self, path: str, content: Any, **options: Any) -> str | None:
        answer = await self.client.post(path, content=content, **options)
        return str(answer.json()["error"]["code"]) if answer.status_code != 200 else None

    def left(self) -> list[str]:
        return os.listdir(self.folder)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    server = App(tmp_path)
    yield server
    await server.client.aclose()


async def drip(parts: int, size: int = 10, every_s: float = 0.1) -> AsyncIterator[bytes]:
    for _ in range(parts):
        yield b"x" * size
        await asyncio.sleep(every_s)


async def test_json_within_its_limits(app: App) -> None:
    assert await app.code("/json", b'{"update_id": "u"}') is None
    assert await app.code("/json", b'{"update_id": "u", "reason": "' + b"x" * 1000 + b'"}') == "too_large"
    assert await app.code("/json", drip(2, size=600, every_s=0)) == "too_large"
    assert await app.code("/json", b"", headers={"Content-Length": "1" * 30}) == "too_large"
    assert await app.code("/json", drip(6)) == "slow_body"


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "1", '"x"', "{", "{}", '{"update_id": 1}', '{"update_id": "u", "more": 1}'),
        *("[" * 999, '{"a":' * 199, '{"update_id": NaN}', '{"update_id": "u", "epoch": 1e999}'),
        *(
            '{"update_id": "u", "epoch": -1}',
            '{"update_id": "u", "epoch": 9007199254740992}',
            '{"update_id": "\\ud800"}',
        ),
    ],
)
async def test_json_that_makes_no_sense_is_refused_by_name(app: App, text: str) -> None:
    assert await app.code("/json", text.encode()) == "invalid_request"


async def test_any_depth_and_any_number_is_only_refused(app: App) -> None:
    app.model = BeginRequest
    deep: Any = "x"
    for _ in range(100):
        deep = {"a": [deep]}
    assert await app.code("/json", json.dumps({"manifest": deep}).encode()) == "invalid_request"
    assert await app.code("/json", b'{"deadlines": {"lease_s": ' + b"9" * 900 + b"}}") == "invalid_request"


async def test_a_bucket_within_its_limits(app: App) -> None:
    assert await app.code("/bucket", b"y" * 600) is None
    assert await app.code("/bucket", drip(3, size=150, every_s=0)) is None
    assert app.seen == [b"y" * 600, b"x" * 450]
    assert await app.code("/bucket", b"y" * 601) == "too_large"
    assert await app.code("/bucket", drip(5, size=150, every_s=0)) == "too_large"
    assert await app.code("/bucket", b"y", headers={"Content-Length": "601"}) == "too_large"
    assert await app.code("/bucket", drip(6)) == "slow_body"
    assert len(app.seen) == 2
    assert app.left() == []


async def test_all_bodies_together_are_bounded_whatever_they_announce(app: App) -> None:
    app.hold.clear()
    first = asyncio.create_task(app.code("/bucket", b"y" * 600))
    async with asyncio.timeout(5):
        while not app.seen:  # noqa: ASYNC110 - the application rings no bell
            await asyncio.sleep(0.01)
    # Another API process has its own object over the same directory.
    app.spool = Spool(app.folder, 1000)
    assert await app.code("/bucket", b"y" * 401) == "too_large"
    # An announced length takes its room before a byte of it has come.
    slow = asyncio.create_task(app.code("/bucket", drip(6), headers={"Content-Length": "390"}))
    await asyncio.sleep(0.1)
    assert await app.code("/bucket", b"y" * 50) == "too_large"
    assert await slow == "slow_body"
    app.hold.set()
    assert await first is None
    assert await app.code("/bucket", b"y" * 401) is None
    assert app.left() == []


async def test_arriving_bytes_are_noted_and_may_be_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightpush_server.bodies._RENEW_S", 0.05)
    assert await app.code("/bucket", drip(2)) is None
    assert app.arrived >= 1

    def refuse() -> None:
        raise WeightPushError(ErrorCode.STALE_UPDATE, "it has ended")

    monkeypatch.setattr(app, "note", refuse)
    assert await app.code("/bucket", drip(2)) == "stale_update"
    assert app.left() == []


async def test_no_room_is_told_as_such(app: App) -> None:
    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    file = SpoolFile(app.folder / "f", Full())  # type: ignore[arg-type] # stands for a file on a full disk
    with pytest.raises(WeightPushError, match="no memory left") as caught:
        file.write(b"x")
    assert caught.value.code is ErrorCode.TOO_LARGE
