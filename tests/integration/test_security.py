"""Who may do what to a real server, by which route, with which bytes, and how slowly."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pickle
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from integration.test_faults import repaired
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess

#: Routes of vLLM that neither run the model nor change it: they answer also while the server does not serve.
HARMLESS = {
    *("GET /openapi.json", "GET /docs", "GET /docs/oauth2-redirect", "GET /redoc", "GET /load", "GET /version"),
    *(
        "GET /kv_event_sources",
        "GET /health",
        "GET /metrics",
        "GET /metrics/",
        "MOUNT /metrics",
        "GET /v1/models",
        "GET /ping",
    ),
    *("POST /tokenize", "POST /detokenize", "POST /ping", "POST /is_scaling_elastic_ep"),
    *("GET /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel"),
    *("POST /v1/messages/count_tokens", "POST /inference/v1/abort_requests"),
    *("POST /v1/chat/completions/render", "POST /v1/messages/render", "POST /v1/completions/render"),
    *("POST /v1/responses/render", "POST /v1/chat/completions/derender", "POST /v1/completions/derender"),
}
#: Routes of vLLM that are shut while the server does not serve.
GATED = {
    *("POST /v1/systemone", "POST /invocations", "POST /v1/chat/completions", "POST /v1/chat/completions/batch"),
    *("POST /v1/responses", "POST /v1/completions", "POST /v1/messages", "POST /generative_scoring"),
    *("POST /scale_elastic_ep", "POST /inference/v1/generate"),
}


def routes_of(server: ServerProcess) -> list[tuple[str, str]]:
    """Return method and path of every route of the server's application, as it says itself."""
    rows = json.loads(server.fault_file.with_suffix(".routes").read_text())
    return [(method, path) for methods, path in rows for method in methods]


def fill(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


@contextmanager
def failed(server: ServerProcess, checkpoints: Checkpoints) -> Iterator[None]:
    """Leave the server without whole weights."""
    update = RawUpdate(server, read_tensors(checkpoints.b), version="half")
    update.begin().raise_for_status()
    update.stream_all([0])
    assert update.abort().json()["state"] == "failed"
    yield


@pytest.mark.case("C24", "C25", "C84")
def test_every_route_of_the_application_has_a_rule(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    check_rules(server, checkpoints)
    repaired(server, checkpoints, cold_b)


def check_rules(server: ServerProcess, checkpoints: Checkpoints, more_control: Collection[str] = ()) -> None:
    """See that every route is a control route, shut while the server does not serve, or known to be harmless.

    ``more_control``: paths of control routes that are not below ``/reload``. Leaves the server failed.
    """
    routes = routes_of(server)
    control = {(method, path) for method, path in routes if path.startswith("/reload") or path in more_control}
    assert {path for _, path in control} >= set(more_control)
    names = ("begin", "stream", "keep", "prepare", "finish", "abort")
    assert {path for _, path in control} >= {f"/reload/{name}" for name in names}
    known = HARMLESS | GATED
    new = {f"{method} {path}" for method, path in set(routes) - control if method != "HEAD"} - known
    assert not new, f"routes without a rule: is the model safe from {sorted(new)}? Put each on one of the lists"
    with failed(server, checkpoints), httpx.Client(base_url=server.url, **server.how, timeout=60) as client:
        for method, path in sorted(routes):
            real = "GET" if method == "MOUNT" else method
            answer = client.request(real, fill(path), **({"json": {}} if real == "POST" else {}))
            shut = answer.status_code == 503 and (real == "HEAD" or "not_serving" in answer.text)
            named = f"{'GET' if method == 'HEAD' else method} {path}"
            if (method, path) == ("GET", "/reload/status"):
                assert answer.status_code == 503
                assert answer.json()["state"] == "failed"
            elif (method, path) in control:
                assert answer.status_code == 401, named
            elif named in HARMLESS:
                assert not shut, named
            else:
                assert shut, (named, answer.status_code, answer.text[:200])


@pytest.mark.case("C26")
def test_no_route_unpickles_anything(server: ServerProcess, checkpoints: Checkpoints, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    evil = pickle.dumps(Evil())
    texts = (evil, base64.b64encode(evil))
    kinds = ("application/json", "application/octet-stream", "application/python-pickle")
    with server.client() as client:
        for method, path in routes_of(server):
            if method != "POST":
                continue
            for kind, content in itertools.product(kinds, texts):
                answer = client.post(fill(path), content=content, headers={"Content-Type": kind})
                if path.startswith("/reload"):
                    assert 400 <= answer.status_code < 500, (path, kind, answer.text)
            quoted = base64.b64encode(evil).decode()
            for field in ("update_id", "manifest", "transport", "digests", "prompt", "messages", "data"):
                client.post(fill(path), json={field: quoted})
        for name in ("Authorization", "Cookie", "X-Weight-Version"):
            client.get("/reload/status", headers={name: base64.b64encode(evil).decode()})
    update = RawUpdate(server, read_tensors(checkpoints.a), version="A")
    update.begin().raise_for_status()
    refused = update.stream(0, evil)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "bucket_mismatch")
    # A header whose metadata holds one, before the bucket's own bytes.
    again = RawUpdate(server, read_tensors(checkpoints.a), version="A")
    again.begin().raise_for_status()
    again.stream(0, again.body(0, digests={name: base64.b64encode(evil).decode() for name in again.tensors}))
    assert not marker.exists()


def open_body(server: ServerProcess, path: str, headers: dict[str, str], start: bytes) -> socket.socket:
    """Send the head of a POST and the first bytes of its body."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + start)
    return connection


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any], bool]:
    """Return status and body of the answer, and whether the server closes the connection after it."""
    response = b""
    closes = False
    while not closes:
        part = connection.recv(65536)
        response += part
        head, _, body = response.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if length is not None and len(body) >= int(length[1]):
            break
        closes = not part
    closes = closes or b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body or b"{}"), closes


@pytest.mark.case("C60")
def test_a_request_whose_body_never_ends_holds_up_no_update(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    body = json.dumps({"model": str(server.model), "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    slow = [open_body(server, "/v1/completions", headers, body[:10]) for _ in range(5)]
    time.sleep(0.3)
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    started = time.monotonic()
    update.begin(deadlines={"drain_s": 60}).raise_for_status()
    assert time.monotonic() - started < 20
    # One that ends meanwhile is refused; one that ends later gets the new weights and their label.
    slow[0].sendall(body[10:])
    assert answer_on(slow[0])[0] == 503
    update.stream_all()
    update.finish().raise_for_status()
    slow[1].sendall(body[10:])
    status, answer, _ = answer_on(slow[1])
    assert (status, answer["choices"][0]["text"]) == (200, cold_b[PROMPTS[0]][: len(answer["choices"][0]["text"])])
    for connection in slow:
        connection.close()
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


def spool_of(server: ServerProcess) -> list[Path]:
    """Return the files in the spool folders of the server's processes."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    folders = {
        Path(value) for process in family for name, value in process.environ().items() if name == "WEIGHTPUSH_SPOOL_DIR"
    }
    # The process that made it does not have it in its own environment.
    folders |= {path for pid in family for path in Path("/dev/shm").glob(f"weightpush-*-{pid.pid}-*/spool")}
    assert folders
    return [file for folder in folders for file in folder.iterdir()]


def test_a_bucket_that_does_not_come_fails_its_update_in_time(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin(deadlines={"bucket_s": 1.0, "lease_s": 60}).raise_for_status()
    body = update.body(0)
    headers = {**server.headers(), "Content-Type": "application/octet-stream", "Content-Length": str(len(body))}
    started = time.monotonic()
    slow = open_body(server, f"/reload/stream?update_id={update.update_id}&bucket=0", headers, body[:100])
    # A byte now and then does not help.
    for _ in range(4):
        time.sleep(0.2)
        slow.sendall(b"x")
    status, answer, closes = answer_on(slow)
    assert time.monotonic() - started < 15
    assert (status, answer["error"]["code"], closes) == (408, "slow_body", True)
    assert answer["error"]["state"] == "failed"
    assert answer["error"]["details"]["received_bytes"] == 104
    assert server.status()["last_error"]["code"] == "slow_body"
    assert spool_of(server) == []
    slow.close()
    repaired(server, checkpoints, cold_b)


def test_limits_of_a_body_hold_before_it_is_read(server: ServerProcess, checkpoints: Checkpoints) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.a), version="A")
    update.begin().raise_for_status()
    where = f"/reload/stream?update_id={update.update_id}&bucket=0"
    for path, kind, length, status, code in (
        (where, "application/octet-stream", 8 * 2**30 + 1, 413, "too_large"),
        ("/reload/begin", "application/json", 128 * 2**20 + 1, 413, "too_large"),
        ("/reload/verify", "application/json", 128 * 2**20 + 1, 413, "too_large"),
        ("/reload/keep", "application/json", 65537, 413, "too_large"),
        ("/reload/prepare", "application/json", 65537, 413, "too_large"),
        ("/reload/finish", "application/json", 65537, 413, "too_large"),
        ("/reload/abort", "application/json", 65537, 413, "too_large"),
        ("/reload/stream?update_id=unknown&bucket=0", "application/octet-stream", 2**20, 409, "stale_update"),
        ("/reload/stream?update_id=a b&bucket=0".replace(" ", "%20"), "application/octet-stream", 9, 422, ""),
        (where.replace("bucket=0", "bucket=-1"), "application/octet-stream", 9, 422, "invalid_request"),
        (where.replace("bucket=0", "bucket=" + "9" * 5000), "application/octet-stream", 9, 422, "invalid_request"),
    ):
        headers = {**server.headers(), "Content-Type": kind, "Content-Length": str(length)}
        with open_body(server, path, headers, b"x") as connection:
            found, answer, _ = answer_on(connection)
            assert found == status, (path, answer)
            assert answer["error"]["code"] == code or not code
    # Nothing of that touched the update.
    assert server.status()["update"]["update_id"] == update.update_id
    update.stream_all()
    update.finish().raise_for_status()
    assert spool_of(server) == []


@pytest.mark.case("C24")
def test_whoever_has_no_token_cannot_hold_a_body_open(server: ServerProcess) -> None:
    for path in ("/reload/begin", "/reload/stream", "/reload/keep", "/reload/prepare", "/reload/finish"):
        with open_body(server, path, {"Content-Length": str(2**30)}, b"x") as connection:
            assert answer_on(connection)[0] == 401
    assert spool_of(server) == []


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_json_of_any_depth_is_only_refused(server: ServerProcess, depth: int) -> None:
    with server.client() as client:
        for start in ("[", '{"manifest":', '{"update_id":['):
            answer = client.post(
                "/reload/begin", content=(start * depth).encode(), headers={"Content-Type": "application/json"}
            )
            assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")
    assert server.status()["serving"]


@pytest.mark.case("C24", "C25")
def test_the_token_stands_nowhere(server: ServerProcess) -> None:
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for process in family:
        for file in ("environ", "cmdline", "comm"):
            assert TOKEN.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes(), (process.pid, file)
    with server.client() as client:
        for path in ("/reload/status", "/reload/manifest", "/openapi.json", "/metrics", "/version", "/v1/models"):
            assert TOKEN not in client.get(path).text, path
        assert TOKEN not in client.post("/reload/begin", json={"transport": {"key": TOKEN}}).text
    assert TOKEN not in server.log.read_text()
