"""A vLLM plugin for benchmarks: adds to every worker what pushes are compared with, and a route to call it by.

It is found through its ``dist-info`` folder once the folder of this file is on ``PYTHONPATH`` and ``VLLM_PLUGINS``
names ``wp_bench`` and ``wp_bench_http``. Its routes need no credentials: for loopback only.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

# From where it is typed.
from torch._C._distributed_c10d import TCPStore

#: How long the group of the per-tensor way may take to form, and one of its broadcasts, in seconds.
_GROUP_S = 120

_registered = False


def register() -> None:
    """General plugin: give the worker extension of weightpush the methods of ``BenchWorker``."""
    global _registered
    if _registered:
        return
    _registered = True
    from weightpush_server.worker import WeightPushWorkerExtension

    for name, method in vars(BenchWorker).items():
        if name.startswith("bench_"):
            setattr(WeightPushWorkerExtension, name, method)


class BenchWorker:
    """RPCs of the worker's main thread. Times are taken here, so that a competitor pays for no round trip of ours."""

    model_runner: Any
    vllm_config: Any
    device: Any
    reload_weights: Any

    def bench_load(self, directory: str) -> dict[str, int]:
        """Read a checkpoint into memory of this process, and take as much again to copy it to."""
        from safetensors import safe_open

        files = sorted(Path(directory).glob("*.safetensors"))
        self._bench_tensors = []
        for file in files:
            with safe_open(file, "pt") as opened:
                # A copy: what is mapped from a file in small pages is slower to read than plain memory.
                self._bench_tensors += [(name, opened.get_tensor(name).clone()) for name in opened.keys()]  # noqa: SIM118
        self._bench_targets = [torch.zeros_like(tensor) for _, tensor in self._bench_tensors]
        nbytes = sum(tensor.nbytes for _, tensor in self._bench_tensors)
        return {"tensors": len(self._bench_tensors), "bytes": nbytes, "pid": os.getpid()}

    def bench_free(self) -> None:
        """Drop what ``bench_load`` took."""
        self._bench_tensors, self._bench_targets = [], []

    def bench_floor(self) -> float:
        """Copy all tensors, one by one; return the seconds. No push can be faster than that."""
        start = perf_counter()
        for target, (_, tensor) in zip(self._bench_targets, self._bench_tensors, strict=True):
            target.copy_(tensor)
        return perf_counter() - start

    def bench_layerwise(self) -> float:
        """Let vLLM reload layer by layer from memory; return the seconds."""
        start = perf_counter()
        self.reload_weights(weights_iterator=iter(self._bench_tensors))
        return perf_counter() - start

    def bench_reload_path(self, directory: str) -> float:
        """Let vLLM reload layer by layer from files; return the seconds."""
        start = perf_counter()
        self.reload_weights(weights_path=directory)
        return perf_counter() - start

    def bench_units(self) -> dict[str, int]:
        """Return the bytes of the largest module's own weights in checkpoint layout: one module's scratch."""
        from weightpush_server.reload.layout import find_layout

        layout = find_layout(self.model_runner.get_model())
        modules: dict[str, int] = {}
        for group in layout.groups if layout is not None else ():
            module = group.name.rpartition(".")[0]
            modules[module] = modules.get(module, 0) + group.nbytes
        return {"largest_module_bytes": max(modules.values(), default=0)}

    # The per-tensor way

    def bench_open_group(self, port: int) -> None:
        """Join the trainer's group as rank 1, and make the model ready for weights that come one by one."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=_GROUP_S))
        self._bench_group: Any = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=_GROUP_S))
        initialize_layerwise_reload(self.model_runner.get_model())

    @torch.no_grad()
    def bench_update(self, name: str, dtype: str, shape: list[int]) -> None:
        """Take one tensor from the trainer and hand it to the model's loaders."""
        from vllm.config import set_current_vllm_config

        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        self._bench_group.broadcast([tensor], dist.BroadcastOptions()).wait()
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights([(name, tensor)])

    @torch.no_grad()
    def bench_close_group(self) -> None:
        """Process what came, and leave the group."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        del self._bench_group

    # Profiles

    def bench_profile(self, file: str | None) -> None:
        """Begin to look at all threads of this process; with ``file``, end it and write what was seen."""
        from benchmarks.profiler import profile

        profile(file)


class BenchEndpoints:
    """Endpoint plugin: ``POST /bench/call``, ``/bench/update`` and ``/bench/profile``."""

    name = "wp_bench_http"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the routes."""
        from fastapi import Body

        pending: list[asyncio.Task[Any]] = []

        async def call(method: str = Body(), args: list[Any] = Body(default_factory=list)) -> dict[str, Any]:  # noqa: B008
            # Errors of the updates before it, first.
            await asyncio.gather(*pending)
            pending.clear()
            return {"answers": await app.state.wp_bench_engine.collective_rpc(method, args=tuple(args))}

        async def update(name: str = Body(), dtype: str = Body(), shape: list[int] = Body()) -> dict[str, Any]:  # noqa: B008
            # Answered at once, as such servers do: the worker waits in the broadcast while the trainer enters it.
            engine = app.state.wp_bench_engine
            pending.append(asyncio.ensure_future(engine.collective_rpc("bench_update", args=(name, dtype, shape))))
            return {}

        async def profile(file: str | None = Body(default=None, embed=True)) -> dict[str, Any]:
            from benchmarks import profiler

            await asyncio.to_thread(profiler.profile, file)
            return {}

        app.post("/bench/call")(call)
        app.post("/bench/profile")(profile)
        app.post("/bench/update")(update)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect to the engine."""
        state.wp_bench_engine = engine_client


def endpoint_plugin() -> BenchEndpoints:
    """Entry point of the endpoint plugin."""
    return BenchEndpoints()
