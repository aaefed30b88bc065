"""A trainer never hangs: whatever a server or the network does at any call, it raises in time, by name, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.contract_server import TOKEN, ContractServer, DroppingProxy, ReceiverProcess
from unit.test_client_push import BUCKET_BYTES, assert_arrived, expected_specs, make_weights, our_threads
from weightpush_client import ErrorCode, PushError, WeightPusher
from weightpush_protocol.manifest import TensorSpec

IDEMPOTENT = ("GET /reload/status", "GET /reload/manifest", "POST /reload/begin", "POST /reload/finish")
ALWAYS = 10**6


@pytest.fixture
def start() -> Iterator[Callable[..., ContractServer]]:
    servers: list[ContractServer] = []

    def make(specs: list[TensorSpec] | None = None, **options: Any) -> ContractServer:
        servers.append(ContractServer(expected_specs() if specs is None else specs, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def push(url: str, **options: Any) -> None:
    with WeightPusher(url, token=TOKEN, **{"transport": "http", "bucket_bytes": BUCKET_BYTES, **options}) as pusher:
        pusher.push(make_weights(), weight_version="v1")


@pytest.mark.case("C14", "C46")
@pytest.mark.parametrize("how", ["half", "reset"])
def test_a_connection_that_breaks_once_is_survived_where_a_call_may_be_repeated(
    how: str, start: Callable[..., ContractServer]
) -> None:
    server = start()
    proxy = DroppingProxy(server.port, dict.fromkeys(IDEMPOTENT, 1), how)
    push(proxy.url)
    proxy.close()
    assert set(proxy.drop.values()) == {0}
    assert_arrived(server)
    assert len(server.begins) == 1
    assert our_threads() == []


@pytest.mark.case("C14")
@pytest.mark.parametrize("how", ["swallow", "half", "reset"])
@pytest.mark.parametrize("call", [*IDEMPOTENT, "POST /reload/stream"])
def test_a_connection_that_always_breaks_ends_in_time_and_by_name(
    call: str, how: str, start: Callable[..., ContractServer]
) -> None:
    server = start()
    proxy = DroppingProxy(server.port, {call: ALWAYS}, how)
    started = time.monotonic()
    with pytest.raises(PushError) as caught:
        push(proxy.url)
    proxy.close()
    assert time.monotonic() - started < 10
    assert our_threads() == []
    error = caught.value
    assert error.server == proxy.url
    assert error.code in (ErrorCode.UNREACHABLE, ErrorCode.PROTOCOL_ERROR)
    assert call in error.message
    assert server.status().update is None
    if call == "POST /reload/stream":
        # A body may have been taken: it is never sent again.
        assert ALWAYS - proxy.drop[call] == 1
        assert list(server.ended.values()) == ["aborted"]
    elif call == "POST /reload/finish" and how != "reset":
        # Committed, and nobody can say so to the trainer, who may ask again with a status.
        assert list(server.ended.values()) == ["committed"]


@pytest.mark.case("C80")
@pytest.mark.parametrize("transport", ["http", "gloo"])
def test_calls_grow_with_buckets_and_not_with_tensors(transport: str, start: Callable[..., ContractServer]) -> None:
    weights = {f"layers.{number}.weight": torch.full((64,), float(number)) for number in range(500)}
    workers = [ReceiverProcess()] if transport == "gloo" else []
    counts = []
    for bucket_bytes in (64 * 4 * 250, 64 * 4 * 50):
        server = start([TensorSpec.of(name, tensor) for name, tensor in weights.items()], workers=workers)
        with WeightPusher(server.url, token=TOKEN, transport=transport, bucket_bytes=bucket_bytes) as pusher:
            buckets = pusher.push(weights, weight_version="v1").buckets
        counts.append(len(server.calls) - buckets)
        assert len(server.weights) == 500
    assert counts[0] == counts[1] <= 6
    for worker in workers:
        worker.close()


def test_a_manifest_that_the_server_knows_is_not_sent_again(start: Callable[..., ContractServer]) -> None:
    weights = {f"layers.{number}.weight": torch.full((4,), float(number)) for number in range(300)}
    server = start([TensorSpec.of(name, tensor) for name, tensor in weights.items()])
    with WeightPusher(server.url, token=TOKEN, transport="http") as pusher:
        begins = []
        for version in ("v1", "v2"):
            server.calls.clear()
            pusher.push(weights, weight_version=version)
            begins.append(server.calls.count("begin"))
        assert begins == [2, 1]
        # Started anew, it knows none: the same push brings the manifest itself.
        server.known.clear()
        server.calls.clear()
        report = pusher.push(weights, weight_version="v3")
        assert (report.tensors, server.calls.count("begin")) == (300, 2)
    assert len(server.weights) == 300
