"""A vLLM general plugin for tests: slows steps down and injects faults, in the processes of a real server.

It is found through its ``dist-info`` folder, once the folder of this file is on ``PYTHONPATH``. Configured by:

* ``WP_TEST_STEP_MS``: sleep this long before each step. A tiny model without it starves the API process.
* ``WP_TEST_VLLM_PLANE=gloo``: workers meet trainers of vLLM's kind over Gloo, see ``support.gloo_plane``.
* ``WP_TEST_FAULT_FILE``: a file that tests write faults into while the server runs, one JSON object:
  ``{"land_bucket": 3, "error": "text"}`` raises in the worker when it lands the bucket with that number (from 0),
  ``{"land_stored_once": "text"}`` raises when stored tensors have landed, ``{"close": "text"}`` raises in post-load
  processing, ``{"close_once": "text"}`` the first time only, ``{"slow_land_ms": 200}`` delays every landing
  of a bucket, ``{"slow_stored_ms": 200}`` that of stored tensors, ``{"slow_close_ms": 3000}`` delays post-load
  processing, ``{"hold": {"opening": 300}}`` makes a phase of an update last longer (see ``_HELD_BY``),
  ``{"label": "text"}`` raises when the workers have committed and the server has not,
  ``{"staging_budget": 0}`` leaves so many bytes for host copies, ``{"flip": "model.norm.weight"}`` flips a bit of this
  tensor once, at the next step.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_done = False


def register() -> None:
    global _done
    if _done:
        return
    _done = True
    _slow_steps()
    if os.environ.get("WP_TEST_VLLM_PLANE") == "gloo":
        _replace_nccl()
    if "WP_TEST_FAULT_FILE" in os.environ:
        _inject_faults(Path(os.environ["WP_TEST_FAULT_FILE"]))
        _list_routes(Path(os.environ["WP_TEST_FAULT_FILE"]).with_suffix(".routes"))


def _slow_steps() -> None:
    delay = float(os.environ.get("WP_TEST_STEP_MS", "0")) / 1000
    if not delay:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    run = GPUModelRunner.execute_model

    @functools.wraps(run)
    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(delay)
        return run(self, *args, **kwargs)

    GPUModelRunner.execute_model = slow


def _replace_nccl() -> None:
    import sys

    sys.path.append(str(Path(__file__).parents[2]))
    from support.gloo_plane import open_gloo_communicator
    from weightpush_server.compat import nccl

    nccl.open_communicator = open_gloo_communicator


def _inject_faults(file: Path) -> None:
    import weightpush_server.receiver as receiver
    import weightpush_server.worker as worker
    import weightpush_server.worker_update as worker_update

    def faults() -> dict[str, Any]:
        return json.loads(file.read_text() or "{}") if file.exists() else {}

    done: set[str] = set()

    def once(fault: dict[str, Any], key: str) -> None:
        if key not in fault:
            done.discard(key)
        elif key not in done:
            done.add(key)
            raise RuntimeError(fault[key])

    land_bucket = receiver.UpdateReceiver._land

    def faulty_land_bucket(self: Any, job: Any, bucket: Any) -> None:
        fault = faults()
        time.sleep(fault.get("slow_land_ms", 0) / 1000)
        if fault.get("land_bucket") == job.bucket:
            raise MemoryError(fault["error"])
        land_bucket(self, job, bucket)

    receiver.UpdateReceiver._land = faulty_land_bucket
    land = worker_update.WorkerUpdate.land

    def faulty_land(self: Any, **options: Any) -> None:
        time.sleep(faults().get("slow_stored_ms", 0) / 1000)
        land(self, **options)
        once(faults(), "land_stored_once")

    worker_update.WorkerUpdate.land = faulty_land
    finish = worker.finish_reload

    def faulty_finish(session: Any) -> Any:
        print("wp_test_plugin: post-load processing", flush=True)
        fault = faults()
        time.sleep(fault.get("slow_close_ms", 0) / 1000)
        if "close" in fault:
            raise RuntimeError(fault["close"])
        once(fault, "close_once")
        return finish(session)

    worker.finish_reload = faulty_finish
    _tell_of_encoder_caches()
    _hold_phases(faults)
    _limit_budget(faults)
    _flip_bits(faults)


def _tell_of_encoder_caches() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    reset = GPUModelRunner.reset_encoder_cache

    @functools.wraps(reset)
    def telling(self: Any) -> None:
        reset(self)
        print("wp_test_plugin: the encoder cache is empty", flush=True)

    GPUModelRunner.reset_encoder_cache = telling


def _list_routes(file: Path) -> None:
    """Write every route of the finished application into ``file``: a JSON list of ``[methods, path]``."""
    from weightpush_server import plugin

    attach, initialise = plugin.WeightPushEndpoints.attach_router, plugin.WeightPushEndpoints.init_state
    apps: list[Any] = []

    def write() -> None:
        file.write_text(json.dumps([row for app in apps for row in _rows(app.routes)]))

    def attach_and_note(self: Any, app: Any) -> None:
        apps.append(app)
        attach(self, app)

    async def initialise_and_list(self: Any, *args: Any) -> None:
        await initialise(self, *args)
        write()

    plugin.WeightPushEndpoints.attach_router = attach_and_note
    plugin.WeightPushEndpoints.init_state = initialise_and_list


def _rows(routes: Any, prefix: str = "") -> list[tuple[list[str], str]]:
    rows = []
    for route in routes:
        path = prefix + getattr(route, "path", "")
        if getattr(route, "routes", None):
            rows += _rows(route.routes, path)
        elif type(route).__name__ == "Mount":
            rows.append((["MOUNT"], path))
        else:
            rows.append((sorted(getattr(route, "methods", None) or ["WEBSOCKET"]), path))
    return rows


def _limit_budget(faults: Callable[[], dict[str, Any]]) -> None:
    from weightpush_server.hostcopy import HostBudget

    total = HostBudget.total
    HostBudget.total = lambda self, held: faults().get("staging_budget", total(self, held))


#: Phase -> the call of a worker that begins it. Resetting the caches is the API process's own work.
_HELD_BY = {
    "checking": "weightpush_check",
    "rendezvous": "weightpush_connect",
    "opening": "weightpush_open",
    "landing": "weightpush_land",
    "closing": "weightpush_close",
    "publishing": "weightpush_commit",
}


def _hold_phases(faults: Callable[[], dict[str, Any]]) -> None:
    from weightpush_server.engine import Engine
    from weightpush_server.worker import WeightPushWorkerExtension

    def hold(phase: str) -> float:
        return faults().get("hold", {}).get(phase, 0) / 1000

    def held(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            time.sleep(hold(phase))
            return method(*args, **kwargs)

        return wrapper

    for phase, name in _HELD_BY.items():
        setattr(WeightPushWorkerExtension, name, held(phase, getattr(WeightPushWorkerExtension, name)))
    reset_caches = Engine.reset_caches

    async def held_reset(self: Any) -> None:
        await asyncio.sleep(hold("resetting_caches"))
        await reset_caches(self)

    Engine.reset_caches = held_reset
    label = Engine.label

    async def faulty_label(self: Any, weight_version: str) -> None:
        if (text := faults().get("label")) is not None:
            raise RuntimeError(text)
        await label(self, weight_version)

    Engine.label = faulty_label


def _flip_bits(faults: Callable[[], dict[str, Any]]) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    run = GPUModelRunner.execute_model
    flipped: list[str] = []

    @functools.wraps(run)
    def flipping(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = faults().get("flip")
        if name is None:
            flipped.clear()
        elif name not in flipped:
            flipped.append(name)
            self.get_model().get_parameter(name).data.view(-1)[5:6].view(torch.uint8)[0] ^= 1
        return run(self, *args, **kwargs)

    GPUModelRunner.execute_model = flipping
