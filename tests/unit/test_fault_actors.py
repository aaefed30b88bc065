"""The campaign's actors: a proxy that really cuts, delays and loses; spoilt buckets; streams read to their end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
import torch

from faults.proxy import Proxy
from faults.traffic import BrokenAnswerError, read_answer
from faults.trainers import swapped


class Upstream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def proxy(seen: list[str]) -> Iterator[Proxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Upstream,), {"seen": seen}))
    thread = Thread(target=server.serve_forever)
    thread.start()
    proxy = Proxy(server.server_address[1])
    yield proxy
    proxy.close()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=20) as client:
        yield client


def test_it_forwards(client: httpx.Client, seen: list[str]) -> None:
    assert [client.get(f"/{number}").text for number in range(3)] == ["ok"] * 3
    assert seen == ["/0", "/1", "/2"]


def test_a_cut_breaks_open_connections_and_refuses_new_ones_until_it_heals(client: httpx.Client, proxy: Proxy) -> None:
    client.get("/before")
    proxy.cut(refuse=True)
    assert proxy.struck
    for _ in range(2):
        with pytest.raises(httpx.TransportError):
            client.get("/during")
    proxy.heal()
    assert client.get("/after").text == "ok"


def test_a_lost_answer_is_lost_once_and_the_request_arrives(
    client: httpx.Client, proxy: Proxy, seen: list[str]
) -> None:
    proxy.drop_response("/lost")
    assert client.get("/other").text == "ok"
    with pytest.raises(httpx.TransportError):
        client.get("/lost")
    assert seen == ["/other", "/lost"]
    assert proxy.struck == 1
    assert client.get("/lost").text == "ok"


def test_a_delay_holds_both_directions_back(client: httpx.Client, proxy: Proxy) -> None:
    client.get("/quick")
    proxy.delay(0.2)
    started = time.monotonic()
    assert client.get("/slow").text == "ok"
    assert time.monotonic() - started >= 0.4


def test_a_dead_upstream_is_a_broken_connection(client: httpx.Client, proxy: Proxy) -> None:
    proxy.upstream = 1
    with pytest.raises(httpx.TransportError):
        client.get("/")


def test_tensors_and_halves_change_places() -> None:
    buffer = torch.arange(8, dtype=torch.uint8)
    same, digests = swapped(buffer, {"a": "1", "b": "2", "c": "3"})
    assert digests == {"a": "3", "b": "2", "c": "1"}
    assert torch.equal(same, buffer)
    mixed, digests = swapped(buffer, {"a": "1"})
    assert digests == {"a": "1"}
    assert mixed.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    # As they travel over shm.
    assert swapped(buffer, b"1" * 8 + b"2" * 8 + b"3" * 8)[1] == b"3" * 8 + b"2" * 8 + b"1" * 8
    mixed, raw = swapped(buffer, b"1" * 8)
    assert (mixed.tolist(), raw) == ([4, 5, 6, 7, 0, 1, 2, 3], b"1" * 8)


def answer_of(text: str, *, streamed: bool) -> object:
    response = httpx.Response(200, text=text, headers={"X-Weight-Version": "A-1"})
    return read_answer("p", response, streamed=streamed)


def test_answers_are_read_to_their_end() -> None:
    parts = [
        'data: {"choices": [{"text": "ab", "finish_reason": null}]}',
        'data: {"choices": [{"text": "c", "finish_reason": "length"}]}',
        "data: [DONE]",
    ]
    streamed = answer_of("\n\n".join(parts), streamed=True)
    plain = answer_of('{"choices": [{"text": "abc", "finish_reason": "length"}]}', streamed=False)
    for answer in (streamed, plain):
        assert (answer.text, answer.finish, answer.version) == ("abc", "length", "A-1")  # type: ignore[attr-defined] # both are answers
    assert answer_of(parts[0], streamed=True) is None
    with pytest.raises(BrokenAnswerError, match="engine is gone"):
        answer_of(parts[0] + '\n\ndata: {"error": {"message": "engine is gone"}}', streamed=True)
