"""The blocks of docs/integrations.md for libraries that need GPUs push to a real socket.

The libraries are stood in for by what the blocks use of them, with the signatures of the versions that the page names.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.contract_server import TOKEN, ContractServer
from support.recipes import run_recipe
from weightpush_protocol.manifest import TensorSpec

Library = Callable[..., ModuleType]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def server(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContractServer]:
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", TOKEN)
    server = ContractServer([TensorSpec.of(name, tensor) for name, tensor in model.state_dict().items()])
    yield server
    server.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Make a module importable for the length of a test."""

    def add(name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(members)
        parts = name.split(".")
        for number in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:number]), ModuleType(parts[0]))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def assert_served(server: ContractServer, model: nn.Module, version: str) -> None:
    assert server.status().weight_version == version
    assert {name: tensor.tolist() for name, tensor in server.weights.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }


@pytest.mark.usefixtures("one_rank")
def test_openrlhf(server: ContractServer, model: nn.Module, library: Library) -> None:
    class ActorPPOTrainer(ABC):  # noqa: B024 - as in the library
        def __init__(self) -> None:
            self.actor = SimpleNamespace(model=SimpleNamespace(module=model))
            self._init_vllm_sync_group("nccl")

        def _init_vllm_sync_group(self, backend: str) -> None:
            raise AssertionError("the recipe replaces it")

        def broadcast_to_vllm(self) -> None:
            raise AssertionError("the recipe replaces it")

    library("openrlhf.trainer.ray.ppo_actor", ActorPPOTrainer=ActorPPOTrainer)
    run_recipe("OpenRLHF")["SERVERS"][:] = [server.url]
    trainer = ActorPPOTrainer()
    for number in (1, 2):
        with torch.no_grad():
            model.get_parameter("0.bias").add_(1)
        trainer.broadcast_to_vllm()
        assert_served(server, model, f"push-{number}")


def test_verl(server: ContractServer, model: nn.Module, library: Library) -> None:
    engines: dict[str, type] = {}

    class Registry:
        @staticmethod
        def register(backend: str) -> Callable[[type], type]:
            return lambda engine: engines.setdefault(backend, engine)

    class Engine(ABC):
        @abstractmethod
        def prepare(self) -> Any: ...
        @classmethod
        @abstractmethod
        def build_topology(cls, *_: Any) -> Any: ...
        @abstractmethod
        def init_process_group(self, **_: Any) -> Any: ...
        @abstractmethod
        def finalize(self) -> Any: ...
        @abstractmethod
        async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...
        @abstractmethod
        async def receive_weights(self, global_steps: int | None = None) -> Any: ...

    class Manager:
        def __init__(self, actor_wg: Any) -> None:
            self.actor_wg = actor_wg

    members = {"CheckpointEngine": Engine, "CheckpointEngineManager": Manager, "CheckpointEngineRegistry": Registry}
    library("verl.checkpoint_engine", **members)
    library("verl.utils.ray_utils", auto_await=lambda call: lambda *args, **kwargs: asyncio.run(call(*args, **kwargs)))
    library("ray", get=lambda results: results)
    manager = run_recipe("verl")["PushManager"]
    ranks = [
        engines["weightpush"](bucket_size=1 << 20, is_master=master, urls=[server.url]) for master in (True, False)
    ]
    gathered = []

    def update_weights(global_steps: int, mode: str) -> None:
        assert mode == "weightpush"
        for rank, engine in enumerate(ranks):
            weights = (gathered.append((rank, name)) or (name, tensor) for name, tensor in model.state_dict().items())
            asyncio.run(engine.send_weights(weights, global_steps=global_steps))

    # As the trainer calls it, outside of any loop; the workers run in processes of their own.
    threads = SimpleNamespace(update_weights=lambda **options: _in_a_thread(update_weights, **options))
    made = manager(threads)
    made.sleep_replicas()
    assert made.update_weights(7) == {}
    assert_served(server, model, "step-7")
    assert gathered == [(rank, name) for rank in (0, 1) for name in model.state_dict()]


def _in_a_thread(call: Callable[..., None], **options: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, **options).result()
