"""Which pages of a browser may read a server: over real HTTP, through the gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.record_server import RecordServer
from weightpush_server.cross_origin import READABLE, parse_origin

TOKEN = "a-token-of-these-tests"
FRIEND = "http://gpu-2:8000"
STRANGER = "https://elsewhere.example"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://gpu-1:8000", "http://gpu-1:8000"),
        ("HTTP://GPU-1:8000/", "http://gpu-1:8000"),
        ("https://wp.example:443", "https://wp.example"),
        ("http://wp.example:80", "http://wp.example"),
        ("http://wp.example:443", "http://wp.example:443"),
        ("http://10.1.2.3:8000", "http://10.1.2.3:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://node_7:1", "http://node_7:1"),
    ],
)
def test_an_origin_is_written_as_browsers_do(text: str, origin: str) -> None:
    assert parse_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    [
        *("*", "", "gpu-1:8000", "http://", "http://*", "http://*.example", "ftp://gpu-1", "null", "http://gpu-1:port"),
        *(
            "http://gpu-1/reload",
            "http://gpu-1?x",
            "http://gpu-1#x",
            "http://user@gpu-1",
            "http://gpu 1",
            "file:///etc",
        ),
        *("http://gpu-1;script-src *", "http://gpu-1'", 'http://gpu-1"', "http://gpu-1:99999"),
        *("http://gpu-1:8000 http://gpu-2", "http://[::1", "http://é.example", "javascript:alert(1)"),
    ],
)
def test_what_is_no_exact_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        parse_origin(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordServer]:
    made = RecordServer(tmp_path_factory.mktemp("server"), token=TOKEN, fleet_origins=[FRIEND]).start()
    yield made
    made.close()


def call(server: RecordServer, method: str, path: str, **headers: str) -> httpx.Response:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        return client.request(method, path, headers=headers)


def preflight(server: RecordServer, path: str, origin: str, method: str = "GET") -> httpx.Response:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization"}
    return call(server, "OPTIONS", path, Origin=origin, **asked)


def readers(answer: httpx.Response) -> str | None:
    return answer.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", sorted(READABLE))
def test_a_page_of_the_fleet_may_ask_for_what_the_page_shows(server: RecordServer, path: str) -> None:
    answer = preflight(server, path, FRIEND)
    assert (answer.status_code, readers(answer)) == (204, FRIEND)
    assert answer.headers["access-control-allow-headers"] == "Authorization"
    assert answer.headers["access-control-allow-methods"] == "GET"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("path", "origin", "method"),
    [
        ("/reload/events", STRANGER, "GET"),
        ("/reload/events", f"{FRIEND}0", "GET"),
        ("/reload/events", "null", "GET"),
        ("/reload/events", FRIEND, "POST"),
        ("/reload/begin", FRIEND, "POST"),
        ("/reload/begin", FRIEND, "GET"),
        ("/reload/manifest", FRIEND, "GET"),
        ("/reload/abort", FRIEND, "POST"),
        ("/reload/nothing", FRIEND, "GET"),
        ("/reload//events", FRIEND, "GET"),
    ],
)
def test_nobody_else_and_nothing_else(server: RecordServer, path: str, origin: str, method: str) -> None:
    answer = preflight(server, path, origin, method)
    assert answer.status_code == 401
    assert "access-control-allow-methods" not in answer.headers


def test_refusals_can_be_read_and_the_token_is_needed_all_the_same(server: RecordServer) -> None:
    refused = call(server, "GET", "/reload/history", Origin=FRIEND)
    assert (refused.status_code, readers(refused)) == (401, FRIEND)
    answer = call(server, "GET", "/reload/history", Origin=FRIEND, Authorization=f"Bearer {TOKEN}")
    assert (answer.status_code, readers(answer), answer.json()["updates"]) == (200, FRIEND, [])
    assert "Origin" in answer.headers["vary"]
    for origin in (STRANGER, "null"):
        other = call(server, "GET", "/reload/status", Origin=origin)
        assert (other.status_code, readers(other)) == (200, None)


def test_without_the_flag_no_page_from_elsewhere_reads_anything(tmp_path: Path) -> None:
    server = RecordServer(tmp_path).start()
    try:
        for path in sorted(READABLE - {"/reload/events"}):
            answer = call(server, "GET", path, Origin=FRIEND)
            assert (answer.status_code, readers(answer)) == (200, None)
        assert readers(preflight(server, "/reload/status", FRIEND)) is None
    finally:
        server.close()


def test_without_a_token_no_page_at_all_changes_anything(tmp_path: Path) -> None:
    """On loopback the only stranger is a web page in the browser of somebody on this machine."""
    server = RecordServer(tmp_path, fleet_origins=[FRIEND]).start()
    try:
        for origin in (FRIEND, STRANGER, server.url, "null"):
            for path in ("/reload/begin", "/reload/abort", "/reload/stream", "/reload"):
                answer = call(server, "POST", path, Origin=origin)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized"), (origin, path)
        assert call(server, "POST", "/reload/abort").json()["error"]["code"] == "invalid_request"
        assert call(server, "GET", "/reload/history", Origin=server.url).status_code == 200
    finally:
        server.close()
