"""Our client and sources in the shapes that vLLM's weight-transfer engines have."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource

from weightpush_client import ErrorCode, PushError, WeightPushError
from weightpush_client.sources import open_source
from weightpush_client.sources.streamed import StreamedSource
from weightpush_client.vllm import VllmSource, VllmSyncClient
from weightpush_protocol.manifest import TensorSpec


class Meta(NamedTuple):
    name: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """Yields ``pairs``, and says ``metadata`` of them."""

    def __init__(self, pairs: list[tuple[str, torch.Tensor]], metadata: list[Meta] | None = None) -> None:
        self.pairs = pairs
        self.alive = 0
        self.most_alive = 0
        self._metadata = metadata

    def metadata(self) -> list[Meta]:
        if self._metadata is not None:
            return self._metadata
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.pairs


PAIRS = [(f"t{number}", torch.full((number + 1,), float(number))) for number in range(5)]


def test_a_source_for_vllm_is_read_as_it_is_needed() -> None:
    source = open_source(Source(PAIRS))
    assert isinstance(source, StreamedSource)
    assert source.specs() == [TensorSpec.of(name, tensor) for name, tensor in PAIRS]
    assert (source.ranks, source.device, source.identity("t1")) == (1, torch.device("cpu"), None)
    for order in (["t0", "t1", "t2", "t3", "t4"], ["t3", "t0", "t4"], ["t4"], []):
        found = list(source.tensors(order))
        assert [name for name, _ in found] == order
        assert all(tensor is dict(PAIRS)[name] for name, tensor in found)
    source.close()


def test_what_vllms_own_source_yields_is_what_a_module_holds() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    theirs, ours = open_source(ModuleSource(model)), open_source(model)
    assert isinstance(theirs, StreamedSource)
    assert theirs.specs() == ours.specs()
    names = [spec.name for spec in ours.specs()]
    for (name, tensor), (other, wanted) in zip(theirs.tensors(names), ours.tensors(names), strict=True):
        assert name == other
        assert torch.equal(tensor, wanted)


def read(source: Source) -> None:
    opened = open_source(source)
    list(opened.tensors([spec.name for spec in opened.specs()]))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (Source(PAIRS[:3], Source(PAIRS).metadata()), "ended before 't3'"),
        (Source(PAIRS, Source(PAIRS[1:]).metadata()), "yields 't0', which its metadata does not name"),
        (Source([("t0", torch.ones(2))], [Meta("t0", torch.float32, (1,))]), r"float32 \[2\], its metadata says"),
        (Source([("t0", torch.ones(1).bool())], [Meta("t0", torch.float32, (1,))]), "bool"),
        (Source([("t0", torch.ones(1))] * 2), "'t0' twice"),
        (Source([("", torch.ones(1))]), "cannot be pushed"),
        (Source([("t0", torch.ones(1, dtype=torch.complex64))]), "complex64 cannot be pushed"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(source: Source, why: str) -> None:
    with pytest.raises(WeightPushError, match=why) as refused:
        read(source)
    assert refused.value.code is ErrorCode.WEIGHTS_REJECTED


def test_a_part_of_a_model_is_refused() -> None:
    class Part(ModuleSource):
        def held_names(self) -> list[str]:
            return ["weight"]

    with pytest.raises(WeightPushError, match="only some"):
        open_source(Part(nn.Linear(2, 2)))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._fsdp_wrapped_module = nn.Linear(3, 2)


@pytest.mark.parametrize("weights", [nn.Linear(3, 2), Wrapped(), dict(nn.Linear(3, 2).state_dict())])
def test_whatever_can_be_pushed_can_be_given_to_vllms_engines(weights: Any) -> None:
    source = VllmSource(weights)
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == [
        ("weight", torch.float32, (2, 3)),
        ("bias", torch.float32, (2,)),
    ]
    held = weights if isinstance(weights, dict) else weights.state_dict()
    for _ in range(2):  # A fresh pass each round, of what the weights are then.
        for tensor in held.values():
            tensor.add_(1)
        assert [name for name, _ in source] == ["weight", "bias"]
        assert all(torch.equal(tensor, held[name]) for (_, tensor), name in zip(source, held, strict=True))
    assert source.held_names() is WeightSource.held_names(ModuleSource(nn.Linear(1, 1)))


def test_what_can_be_read_once_is_no_source() -> None:
    with pytest.raises(TypeError, match="once only"):
        VllmSource(iter(PAIRS))


class Server(ThreadingHTTPServer):
    """Notes calls; answers ``answers[path]`` where there is one: a status and a body."""

    def __init__(self, world_size: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[tuple[str, str, Any, str | None]] = []
        self.answers: dict[str, tuple[int, Any]] = {"/get_world_size": (200, {"world_size": world_size})}
        self.tokens = {"secret"}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.server.calls.append((self.command, self.path, json.loads(body or b"null"), token))
        status, answer = self.server.answers.get(self.path, (200, {"message": "done"}))
        if token not in self.server.tokens:
            status, answer = 401, {"error": {"code": "unauthorized", "message": "no"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    servers = [Server(2), Server(4)]
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def test_several_servers_are_one_group(servers: list[Server]) -> None:
    init = {"master_address": "me", "master_port": 1, "rank_offset": 1, "world_size": 7, "packed": True}
    info = {"names": [], "dtype_names": [], "shapes": []}
    with VllmSyncClient([server.url for server in servers], token="secret") as client:
        assert client.world_size == 7
        for server in servers:
            server.calls.clear()
        client.init_weight_transfer_engine(init)
        client.start_weight_update()
        client.update_weights(info)
        client.finish_weight_update("step-1")
        client.finish_weight_update()
        client.shutdown_weight_transfer_engine()
    for server, offset in zip(servers, (1, 3), strict=True):
        assert [call[:3] for call in server.calls] == [
            ("GET", "/get_world_size", None),
            ("POST", "/init_weight_transfer_engine", {"init_info": {**init, "rank_offset": offset}}),
            ("POST", "/start_weight_update", {}),
            ("POST", "/update_weights", {"update_info": info}),
            ("POST", "/finish_weight_update", {"weight_version": "step-1"}),
            ("POST", "/finish_weight_update", {"weight_version": None}),
            ("POST", "/shutdown_weight_transfer_engine", {}),
        ]


def test_refusals_come_with_their_code_and_their_server(servers: list[Server], tmp_path: Path) -> None:
    error = {"message": "two workers differ", "type": "manifest_rejected", "param": None, "code": 422}
    servers[1].answers["/finish_weight_update"] = (422, {"error": error})
    servers[1].answers["/update_weights"] = (502, "a proxy's own words")
    file = tmp_path / "token"
    file.write_text("old\n")
    with VllmSyncClient([server.url for server in servers], token_file=file) as client:
        with pytest.raises(PushError) as refused:
            client.start_weight_update()
        assert refused.value.code is ErrorCode.UNAUTHORIZED
        file.write_text("secret\n")
        client.start_weight_update()  # The token was exchanged: it is read again.
        with pytest.raises(PushError, match="two workers differ") as refused:
            client.finish_weight_update()
        assert (refused.value.code, refused.value.server) == (ErrorCode.MANIFEST_REJECTED, servers[1].url)
        with pytest.raises(PushError, match="HTTP 502") as refused:
            client.update_weights({})
        assert refused.value.code is ErrorCode.PROTOCOL_ERROR
        assert len([call for call in servers[1].calls if call[1] == "/update_weights"]) == 1  # Never twice.
        servers[0].shutdown()
        servers[0].server_close()
        with pytest.raises(PushError) as refused:
            client.start_weight_update()
        assert (refused.value.code, refused.value.server) == (ErrorCode.UNREACHABLE, servers[0].url)
