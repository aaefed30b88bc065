"""The processes that are measured: servers on one core, the trainer on another."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx

from tiny_model import CPU_ENVIRONMENT
from weightpush_client.server_child import ServerChild

_ROOT: Final = Path(__file__).resolve().parents[1]
_PLUGIN: Final = Path(__file__).parent / "vllm_plugin"
_PLUGINS: Final = "weightpush,weightpush_http,wp_bench,wp_bench_http"
_OPTIONS: Final = (
    "--distributed-executor-backend=uni",
    "--enforce-eager",
    "--max-num-seqs=4",
    "--max-model-len=256",
    "--dtype=bfloat16",
    # No more cache than a request or two need: several servers share this machine.
    "--num-gpu-blocks-override=32",
)
#: Seconds that a server may take to start, a call of the benchmark to be answered, and a trainer's command to run.
_START_S: Final = 300.0
_CALL_S: Final = 180.0


class BenchError(Exception):
    """A process of the benchmark did not do what it was asked for; the text says which and why."""


def environment() -> dict[str, str]:
    """Return the environment of all processes: one thread each, and the packages of this checkout."""
    folders = [str(_ROOT / folder) for folder in (".", "examples", "protocol", "server", "trainer_client")]
    path = os.pathsep.join([str(_PLUGIN), *folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Forked: an engine's process that is spawned would import everything once more.
    return {
        **os.environ,
        **CPU_ENVIRONMENT,
        "PYTHONPATH": path,
        "VLLM_PLUGINS": _PLUGINS,
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cores() -> tuple[int, int]:
    """Return the core of the trainer and the core of the servers: the first two that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BenchServer:
    """A ``weightpush serve`` with the benchmark's plugin. It starts on all cores; `wait` pins it to its own."""

    def __init__(self, directory: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        self.directory = directory
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "weightpush_client", "serve", str(directory), "--end-with-stdin"]
        command += [f"--port={port}", "--host=127.0.0.1", *_OPTIONS, *arguments]
        self._file = log.open("a")
        self._child = ServerChild(command, environment(), self._echo)
        # Somebody has to wait for it, or its end is never known.
        threading.Thread(target=self._child.wait, name="server-end", daemon=True).start()
        # Cut off by its own caller where it hangs; a proxy of the environment has no business here.
        self._http = httpx.Client(base_url=self.url, trust_env=False, timeout=_CALL_S)

    def _echo(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def wait(self) -> BenchServer:
        """Wait until it serves, and give all of it one core.

        Raises:
            BenchError: it ended, or took too long.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if not self._child.alive:
                raise BenchError(f"the server on {self.directory.name} ended:\n{self._child.tail(25)}")
            with contextlib.suppress(httpx.HTTPError):
                if self._http.get("/reload/status", timeout=5).status_code == 200:
                    self._pin()
                    return self
            time.sleep(0.2)
        raise BenchError(f"the server on {self.directory.name} was not up in time:\n{self._child.tail(25)}")

    def _pin(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):  # One of them may have ended.
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {cores()[1]})

    @property
    def process_alive(self) -> bool:
        """Whether its processes run, and one of them answers."""
        with contextlib.suppress(httpx.HTTPError):
            return self._child.alive and self._http.get("/reload/status", timeout=5).status_code in (200, 503)
        return False

    @property
    def alive(self) -> bool:
        """Whether it answers and serves."""
        with contextlib.suppress(httpx.HTTPError):
            return self._child.alive and self._http.get("/reload/status", timeout=5).status_code == 200
        return False

    def status(self) -> dict[str, Any]:
        """Return the body of its status."""
        status: dict[str, Any] = self._http.get("/reload/status").json()
        return status

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the benchmark in the only worker, and return its answer.

        Raises:
            BenchError: it raised, or the server went away.
        """
        return self._post("/bench/call", {"method": method, "args": args}, method)["answers"][0]

    def profile(self, file: str | None) -> None:
        """Begin to look at its first process, which answers HTTP; with ``file``, have it write what was seen.

        Raises:
            BenchError: it raised, or the server went away.
        """
        self._post("/bench/profile", {"file": file}, "profile")

    def _post(self, path: str, body: dict[str, Any], what: str) -> Any:
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise BenchError(f"{what}: the server did not answer: {error}") from error
        if response.status_code != 200:
            lines = [line for line in self._child.tail(80).splitlines() if "Error" in line]
            raise BenchError(f"{what}: HTTP {response.status_code}: {(lines or [response.text[:300]])[-1]}")
        return response.json()

    def processes(self) -> list[int]:
        """Return the ids of all its processes."""
        found = [self._child.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

    def stop(self) -> None:
        """End it."""
        self._http.close()
        self._child.stop(15)
        self._file.close()


class TrainerProcess:
    """A process that holds a model and does what it is told, see ``benchmarks.trainer``. A context manager."""

    def __init__(self, log: Path) -> None:
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainer"],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, {cores()[0]})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have it carry out ``command`` and return what it answers.

        Raises:
            BenchError: it raised; or it has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": command, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the trainer ended with {self._process.wait()} at {command}; see its log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{command}: {answer['error']}")
        return answer

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # It ends with its input.
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def stop_all(servers: Sequence[BenchServer]) -> None:
    """End all, whatever happens to one of them."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
