"""A real ``weightpush serve`` in a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from weightpush_server.processes import children_of

PLUGIN_FOLDER = Path(__file__).parent / "vllm_plugin"

#: What makes vLLM on CPU start quickly and share two cores.
CHEAP_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "WP_TEST_STEP_MS": "10",
}
CHEAP_ARGUMENTS = ("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "256", "--dtype", "bfloat16")
START_TIMEOUT_S = 480


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """Start with ``start`` or ``with``; everything it started dies with ``stop``."""

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str] = (),
        *,
        environment: dict[str, str] | None = None,
        folder: Path,
        token: str | None = None,
        host: str = "127.0.0.1",
        executor: str | None = "uni",
        ca_file: Path | None = None,
        prefix: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        self.model = model
        self.port = free_port() if port is None else port
        self.token = token
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if ca_file else 'http'}://{shown}:{self.port}"
        #: What httpx needs to talk to it: no proxies, and its own CA where it has one.
        self.how: dict[str, Any] = {"trust_env": False}
        if ca_file is not None:
            self.how["verify"] = ssl.create_default_context(cafile=str(ca_file))
        self.log = folder / f"server-{self.port}.log"
        self.fault_file = folder / f"faults-{self.port}.json"
        # A program that starts it in other circumstances.
        self._command = [*prefix, sys.executable, "-m", "weightpush_client", "serve", str(model)]
        self._command += ["--host", host, "--port", str(self.port), *CHEAP_ARGUMENTS]
        if executor is not None:
            self._command += ["--distributed-executor-backend", executor]
        self._command += arguments
        path = os.pathsep.join(filter(None, [str(PLUGIN_FOLDER), os.environ.get("PYTHONPATH")]))
        self._environment = {**os.environ, **CHEAP_ENVIRONMENT, "PYTHONPATH": path}
        self._environment["WP_TEST_FAULT_FILE"] = str(self.fault_file)
        if token is not None:
            self._environment["WEIGHTPUSH_CONTROL_TOKEN"] = token
        # Tests with an engine in their own process choose plugins there; a server shall find the one for tests.
        self._environment.pop("VLLM_PLUGINS", None)
        self._environment.update(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self._process is not None
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """Return the command line of every process of the server by id: supervisor, keeper, and all below them."""
        found, parents = {self.pid: ""}, [self.pid]
        while parents:
            parent = parents.pop()
            for child in children_of(parent):
                found[child] = ""
                parents.append(child)
        for pid in list(found):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper."""
        return children_of(self.pid)[0]

    @property
    def server_pid(self) -> int:
        """Process id of the server's first process: with one API process, this is it."""
        return next(pid for pid in children_of(self.keeper_pid) if "weightpush_server" in self.processes()[pid])

    def start(self) -> ServerProcess:
        """Launch without waiting."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> ServerProcess:
        """Wait until it serves."""
        return self._wait(200, timeout_s)

    def wait_up(self, timeout_s: float = START_TIMEOUT_S) -> ServerProcess:
        """Wait until it answers, whether it serves or awaits weights."""
        return self._wait(503, timeout_s)

    def _wait(self, at_most: int, timeout_s: float) -> ServerProcess:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server exited with {self._process.returncode}:\n{self.tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/reload/status", **self.how, timeout=2).status_code <= at_most:
                    return self
            time.sleep(0.2)
        raise TimeoutError(f"the server was not up after {timeout_s} s:\n{self.tail()}")

    def wait_exit(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Wait until it has ended and return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def tail(self, lines: int = 60) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the whole process group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def __enter__(self) -> ServerProcess:
        try:
            return self.start().wait_ready()
        except BaseException:
            self.stop()  # Nobody else will: a block that was not entered is not left either.
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Talking to it

    def headers(self) -> dict[str, str]:
        """Return the credentials of the control routes."""
        return {"Authorization": f"Bearer {self.token}"} if self.token is not None else {}

    def client(self, timeout_s: float = 60) -> httpx.Client:
        """Return an HTTP client with the control token."""
        return httpx.Client(base_url=self.url, headers=self.headers(), **self.how, timeout=timeout_s)

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /reload/status``."""
        status: dict[str, Any] = httpx.get(f"{self.url}/reload/status", **self.how, timeout=10).json()
        return status

    def wait_state(self, state: str, timeout_s: float = 30) -> dict[str, Any]:
        """Wait until the server is in ``state`` and return its status."""
        deadline = time.monotonic() + timeout_s
        while (status := self.status())["state"] != state:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still {status['state']}, not {state}: {status}\n{self.tail()}")
            time.sleep(0.02)
        return status

    def wait_running(self, timeout_s: float = 30) -> None:
        """Wait until the engine works on a request."""
        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            while not re.search(r"^vllm:num_requests_running\S* [1-9]", client.get("/metrics").text, re.MULTILINE):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no request runs:\n{self.tail()}")
                time.sleep(0.02)

    def complete(
        self, prompt: str = "weights", *, max_tokens: int = 12, engine: int | None = None, **options: Any
    ) -> httpx.Response:
        """Ask for a greedy completion; of one of several data-parallel engines, if ``engine`` says which."""
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
        body.setdefault("ignore_eos", True)
        headers = {"X-data-parallel-rank": str(engine)} if engine is not None else {}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, **self.how, timeout=120)

    def answered(self, engine: int) -> int:
        """Return how many requests a data-parallel engine has completed."""
        with self.client() as client:
            text = client.get("/metrics").text
        lines = re.findall(rf'^vllm:request_success_total{{.*engine="{engine}".*}} ([0-9.]+)', text, re.MULTILINE)
        return sum(int(float(count)) for count in lines)

    def answer(self, prompt: str = "weights", **options: Any) -> str:
        """Return the text of a greedy completion."""
        response = self.complete(prompt, **options)
        response.raise_for_status()
        text: str = response.json()["choices"][0]["text"]
        return text

    def set_faults(self, **faults: Any) -> None:
        """Inject faults into the workers, see ``wp_test_plugin``; without arguments, none."""
        self.fault_file.write_text(json.dumps(faults))
