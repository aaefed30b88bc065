"""Ranks of a trainer: real processes with a real Gloo group, which run what a test gives them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout_s: float) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    pipe.send(("ok", None))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # Groups whose other ranks are gone already may wait for them at exit.
        try:
            pipe.send(("ok", function(rank, *arguments)))
        except BaseException as error:  # noqa: BLE001 - the test judges it
            error.add_note(traceback.format_exc())
            pipe.send(("error", error))
            if isinstance(error, KeyboardInterrupt):
                sys.exit()  # As a trainer does, with whatever it still holds.


class Ranks:
    """``size`` processes of one group. Functions that they run are module-level and take the rank first."""

    def __init__(self, size: int, folder: Path, timeout_s: float = 120) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(folder / f"store-{time.monotonic_ns()}")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, store, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.results(300)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have all ranks run ``function(rank, *arguments)``."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self, timeout_s: float = 180) -> list[Any]:
        """Return what each rank returned; an exception where it raised one, EOFError where it died."""
        deadline = time.monotonic() + timeout_s
        return [self._result(rank, deadline) for rank in range(len(self._pipes))]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 180) -> list[Any]:
        """Run ``function`` on all ranks and return what each returned. Raises the first exception."""
        self.start(function, *arguments)
        results = self.results(timeout_s)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def kill(self, rank: int) -> None:
        """End a rank at once."""
        self.signal(rank, signal.SIGKILL)
        self._processes[rank].join()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _result(self, rank: int, deadline: float) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not answer")
        try:
            return pipe.recv()[1]
        except EOFError as error:
            return error
