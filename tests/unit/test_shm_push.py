"""`WeightPusher` over shared memory: when ``auto`` takes it, what happens where it fails, and what is left of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from support.contract_server import TOKEN, ContractServer, ReceiverProcess
from weightpush_client import Deadlines, ErrorCode, PushError, WeightPusher
from weightpush_client.transport import choose_transport
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.status import Status, WorkerStatus
from weightpush_protocol.transports.shared_memory import MEMORY_NAME, host_id

ALL = ("shm", "gloo", "http")
MakeServer = Callable[..., ContractServer]


def make_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{number}": torch.randn(500, generator=generator) for number in range(8)} | {
        "empty": torch.empty(0, 3)
    }


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ReceiverProcess]]:
    processes = [ReceiverProcess(), ReceiverProcess()]
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    servers: list[ContractServer] = []

    def make(**options: Any) -> ContractServer:
        specs = [TensorSpec.of(name, tensor) for name, tensor in make_weights().items()]
        servers.append(ContractServer(specs, **{"transports": ALL, "host_id": host_id()} | options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def pusher_for(*servers: ContractServer, **options: Any) -> WeightPusher:
    return WeightPusher([server.url for server in servers], **{"token": TOKEN, "bucket_bytes": 4096} | options)


def arrived(server: ContractServer, weights: dict[str, torch.Tensor]) -> bool:
    return server.weights.keys() == weights.keys() and all(
        torch.equal(server.weights[name], tensor) for name, tensor in weights.items()
    )


def refuse_shm(server: ContractServer) -> None:
    """Have the server answer as one whose workers cannot map the memory."""

    async def refuse() -> None:
        raise WeightPushError(ErrorCode.TRANSPORT_UNAVAILABLE, "no trainer listens at @weightpush-00")

    server.hooks["begin"] = refuse


def shared_memory() -> set[int]:
    """Return the numbers of the shared buffers that this process has mapped or open."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if MEMORY_NAME in line]
    found = {int(line[4]) for line in lines}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if MEMORY_NAME in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found


def test_auto_shares_memory_with_workers_on_this_host_and_with_no_others(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    near, far = make_server(workers=workers[:1]), make_server(workers=workers[1:], host_id="f" * 16)
    with pusher_for(near) as pusher:
        assert pusher.push(make_weights(), weight_version="v1").transport == "shm"
    with pusher_for(far) as pusher:
        assert pusher.push(make_weights(), weight_version="v1").transport == "gloo"
    with pusher_for(near, far) as pusher:
        assert pusher.push(make_weights(2), weight_version="v2").transport == "shm+gloo"
    assert arrived(near, make_weights(2))
    assert arrived(far, make_weights(2))


def test_auto_needs_to_know_the_host_of_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def status(*hosts: str, transports: tuple[str, ...] = ALL) -> Status:
        workers = [
            WorkerStatus(rank=rank, pid=1, device="cpu", transports=list(transports), host_id=host, weight_version="v0")
            for rank, host in enumerate(hosts)
        ]
        return Status(
            protocol="1.0", instance_id="i", state="serving", serving=True, weight_version="v0", workers=workers
        )

    here = host_id()
    assert choose_transport("auto", status(here, here), cpu) == "shm"
    assert choose_transport("auto", status(here, here), cpu, without=("shm",)) == "gloo"
    assert choose_transport("auto", status(here, "f" * 16), cpu) == "gloo"
    assert choose_transport("auto", status(""), cpu) == "gloo"
    assert choose_transport("auto", status(here, transports=("gloo", "http")), cpu) == "gloo"
    assert choose_transport("auto", status(), cpu) == "http"
    # Host memory is the way for a GPU only where NCCL is none.
    assert choose_transport("auto", status(here), cuda) == "shm"
    assert choose_transport("auto", status(here, transports=(*ALL, "nccl")), cuda) == "nccl"
    # NCCL refuses two processes on one GPU; two that are apart may use it, also on one host.
    colocated = status(here, transports=(*ALL, "nccl"))
    there = [worker.model_copy(update={"gpu": "some-gpu"}) for worker in colocated.workers]
    colocated = colocated.model_copy(update={"workers": there})
    assert choose_transport("auto", colocated, cuda, gpu="some-gpu") == "shm"
    assert choose_transport("auto", colocated, cuda, gpu="another") == "nccl"
    # Neither side knows: that is not the same host.
    monkeypatch.setattr("weightpush_client.transport.host_id", lambda: "")
    assert choose_transport("auto", status("", ""), cpu) == "gloo"


def test_auto_goes_on_without_shared_memory_in_the_same_push(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    servers = make_server(workers=workers[:1]), make_server(workers=workers[1:])
    asked = 0

    async def refuse_once() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise WeightPushError(ErrorCode.TRANSPORT_UNAVAILABLE, "the worker is in another network namespace")

    servers[1].hooks["begin"] = refuse_once
    with pusher_for(*servers) as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
    assert report.transport == "shm+gloo"
    assert [server.status().weight_version for server in servers] == ["v1", "v1"]
    assert all(arrived(server, make_weights()) for server in servers)
    assert len({begin.update_id for begin in servers[0].begins}) == 2


def test_auto_goes_on_where_this_system_gives_no_such_memory(
    make_server: MakeServer, workers: list[ReceiverProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.memfd_create", none_left)
    server = make_server(workers=workers)
    with pusher_for(server) as pusher:
        assert pusher.push(make_weights(), weight_version="v1").transport == "gloo"
    with pusher_for(server, transport="shm") as pusher, pytest.raises(PushError, match="Too many open files") as caught:
        pusher.push(make_weights(), weight_version="v2")
    assert caught.value.code is ErrorCode.TRANSPORT_UNAVAILABLE


def test_who_asks_for_shared_memory_gets_it_or_an_error(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    server = make_server(workers=workers)
    refuse_shm(server)
    with pusher_for(server, transport="shm") as pusher, pytest.raises(PushError, match="no trainer listens") as caught:
        pusher.push(make_weights(), weight_version="v1")
    assert caught.value.code is ErrorCode.TRANSPORT_UNAVAILABLE
    assert caught.value.server == server.url


def test_the_memory_is_kept_until_the_pusher_closes_and_never_after_a_failure(
    make_server: MakeServer, workers: list[ReceiverProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(workers=workers)
    gc.collect()
    before = shared_memory()  # What exceptions that other tests keep still refer to.
    with pusher_for(server, transport="shm") as pusher:
        pusher.push(make_weights(0), weight_version="v0")
        (kept,) = shared_memory() - before
        for number in range(1, 3):
            pusher.push(make_weights(number), weight_version=f"v{number}")
            assert shared_memory() - before == {kept}
        assert arrived(server, make_weights(2))
        with monkeypatch.context() as patch:
            patch.setattr("weightpush_client.stream.raw_digests", lambda _, places: bytes(8 * len(places)))
            with pytest.raises(PushError):
                pusher.push(make_weights(), weight_version="v3")
        gc.collect()
        assert shared_memory() <= before
        pusher.push(make_weights(), weight_version="v4")
        assert shared_memory() - before

        async def refuse() -> None:
            raise WeightPushError(ErrorCode.POSTLOAD_FAILED, "after all buckets were there")

        server.hooks["finish"] = refuse
        with pytest.raises(PushError, match="after all buckets"):
            pusher.push(make_weights(), weight_version="v5")
        gc.collect()
        assert shared_memory() <= before
    gc.collect()
    assert shared_memory() <= before


def test_a_worker_that_is_never_done_with_a_bucket_is_named(
    make_server: MakeServer, workers: list[ReceiverProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(workers=workers)
    monkeypatch.setattr("weightpush_client.delivery._REASON_S", 0.2)
    # The announcement is heard, but nobody takes the bucket.
    monkeypatch.setattr(ContractServer, "_receive", lambda *_: _nothing())
    monkeypatch.setattr(ContractServer, "_settled", lambda *_: _nothing())
    with (
        pusher_for(server, transport="shm", deadlines=Deadlines(bucket_s=0.5)) as pusher,
        pytest.raises(PushError, match=r"worker rank 1 did not take bucket 0 within 0\.5 s") as caught,
    ):
        pusher.push(make_weights(), weight_version="v1")
    assert caught.value.code is ErrorCode.TRANSPORT_FAILED
    assert caught.value.details["lost_servers"] == [server.url]


async def _nothing() -> None:
    return None


def test_the_memory_goes_with_the_pusher_and_waits_for_no_garbage_collection(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    server = make_server(workers=workers)
    gc.collect()
    before = shared_memory()
    gc.disable()
    try:
        with pusher_for(server, transport="shm") as pusher:
            pusher.push(make_weights(), weight_version="v1")
            pusher.push(make_weights(1), weight_version="v2")
            assert len(shared_memory() - before) == 1
        assert shared_memory() <= before
    finally:
        gc.enable()
