"""The trainer's process: reads commands, one JSON object a line, and answers each with one line of JSON.

``make``: make a model and save it; ``change``: give it other weights; ``push``; ``save``: as the file way does;
``per_tensor``: push as the per-tensor way does; ``close``: free all buffers; ``profile``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import torch
import torch.distributed as dist

# From where it is typed.
from torch._C._distributed_c10d import TCPStore

from benchmarks.models import Model, change_weights, make_model, save_model
from benchmarks.processes import free_port
from benchmarks.profiler import profile
from weightpush_client import PushProgress, WeightPusher
from weightpush_protocol.manifest import DEFAULT_BUCKET_BYTES

_GROUP_S = 120


class Trainer:
    """Holds the model; each method carries out the command of its name and returns the answer."""

    def __init__(self) -> None:
        self._model = torch.nn.Module()
        self._tensors: dict[str, torch.Tensor] = {}
        self._pushers: dict[tuple[Any, ...], WeightPusher] = {}
        self._pushes = 0

    def make(self, key: str, what: str, model_type: str, config: Mapping[str, Any], directory: str) -> dict[str, Any]:
        """Make a model, save it in ``directory``, and hold it from now on."""
        self._model = make_model(Model(key, what, model_type, config), seed=0)
        save_model(self._model, Path(directory))
        return {"parameters": sum(parameter.numel() for parameter in self._model.parameters())}

    def change(self) -> dict[str, Any]:
        """Give the model other weights; list its tensors as a checkpoint holds them, without copying any."""
        from weightpush_client.sources import open_source

        change_weights(self._model)
        source = open_source(self._model)
        names = {spec.name: spec.torch_dtype for spec in source.specs()}
        self._tensors = dict(source.tensors(list(names), names))
        source.close()
        return {"tensors": len(self._tensors), "bytes": sum(tensor.nbytes for tensor in self._tensors.values())}

    def push(
        self,
        urls: list[str],
        transport: str,
        mode: str,
        bucket_bytes: int | None = None,
        whole: bool = True,
        progress: bool = False,
        prefixes: list[str] | None = None,
    ) -> dict[str, Any]:
        """Push the module (``whole``) or its tensors; return the client's report.

        ``prefixes``: of these the ones whose names begin so, leaving the others as they are.
        ``progress``: have it told on the way, which is how the size of the largest bucket is known.
        """
        key = (tuple(urls), transport, mode, bucket_bytes)
        if key not in self._pushers:
            size = bucket_bytes or DEFAULT_BUCKET_BYTES
            self._pushers[key] = WeightPusher(urls, transport=transport, mode=mode, bucket_bytes=size)
        self._pushes += 1
        weights = self._model if whole else self._part(prefixes)
        sent = [0]

        def note(at: PushProgress) -> None:
            sent.append(at.bytes)

        start = perf_counter()
        report = self._pushers[key].push(
            weights,
            weight_version=f"push-{self._pushes}",
            partial=prefixes is not None,
            progress=note if progress else None,
        )
        seconds = perf_counter() - start
        return {
            "seconds": seconds,
            "phases": asdict(report.phases),
            "pause_seconds": report.pause_seconds,
            "bytes": report.bytes,
            "tensors": report.tensors,
            "buckets": report.buckets,
            "largest_bucket": max(after - before for before, after in pairwise(sent)) if progress else None,
            "transport": report.transport,
            "fingerprints": [server.fingerprint for server in report.servers],
        }

    def size(self, prefixes: list[str] | None) -> dict[str, Any]:
        """Return how many tensors begin with one of ``prefixes``, and their bytes."""
        tensors = self._part(prefixes)
        return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}

    def _part(self, prefixes: list[str] | None) -> dict[str, torch.Tensor]:
        if prefixes is None:
            return self._tensors
        return {name: tensor for name, tensor in self._tensors.items() if name.startswith(tuple(prefixes))}

    def save(self, directory: str) -> dict[str, Any]:
        """Save the model as a checkpoint."""
        start = perf_counter()
        self._model.save_pretrained(directory)  # type: ignore[operator]  # transformers' own, which is untyped
        return {"seconds": perf_counter() - start}

    def per_tensor(self, url: str) -> dict[str, Any]:
        """Send one HTTP call and one broadcast for each tensor."""
        port = free_port()
        timeout = timedelta(seconds=_GROUP_S)
        with httpx.Client(base_url=url, trust_env=False, timeout=_GROUP_S) as http:

            def call(method: str, *args: Any) -> None:
                http.post("/bench/call", json={"method": method, "args": args}).raise_for_status()

            start = perf_counter()
            store = TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False, timeout=timeout)
            with ThreadPoolExecutor(1) as pool:
                opened = pool.submit(call, "bench_open_group", port)
                group: Any = dist.ProcessGroupGloo(store, 0, 2, timeout)
                opened.result()
            for name, tensor in self._tensors.items():
                body = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                http.post("/bench/update", json=body).raise_for_status()
                group.broadcast([tensor.contiguous()], dist.BroadcastOptions()).wait()
            call("bench_close_group")
            return {"seconds": perf_counter() - start}

    def close(self) -> dict[str, Any]:
        """Close all pushers."""
        for pusher in self._pushers.values():
            pusher.close()
        self._pushers.clear()
        return {}

    def profile(self, file: str | None) -> dict[str, Any]:
        """Begin to look at all threads; with ``file``, end it and write what was seen."""
        profile(file)
        return {}


def main() -> None:
    """Read commands until the input ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    trainer = Trainer()
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(trainer, arguments.pop("do"))(**arguments)
        except Exception as error:  # noqa: BLE001 - the benchmark reports it and goes on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
