"""Steady traffic on a server, for tests of what it is told while weights change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from support.server import ServerProcess
from weightpush_protocol.messages import VERSION_HEADER


class Traffic:
    """Clients that ask all the time, and what they were told."""

    def __init__(self, server: ServerProcess, prompts: Sequence[str], clients: int = 2) -> None:
        self.server = server
        self._prompts = prompts
        self.answers: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[int] = Counter()
        #: State of the server as each refusal gave it.
        self.refused_in: Counter[str] = Counter()
        self.slow_status = 0.0
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients + 1)
        self._jobs = [self._pool.submit(self._ask, number) for number in range(clients)]
        self._jobs.append(self._pool.submit(self._watch))

    def _ask(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            prompt = self._prompts[turn % len(self._prompts)]
            turn += 1
            response = self.server.complete(prompt)
            if response.status_code == 200:
                choice = response.json()["choices"][0]
                if choice["finish_reason"] == "length":
                    self.answers[response.headers[VERSION_HEADER], prompt, choice["text"]] += 1
                else:
                    assert choice["finish_reason"] == "abort", choice
            else:
                self.refused[response.status_code] += 1
                self.refused_in[response.json()["error"]["state"]] += 1
                if "Retry-After" not in response.headers:
                    assert self.server.status()["state"] in ("serving", "updating", "failed")
                time.sleep(0.005)

    def _watch(self) -> None:
        # A busy machine can let a connection idle for longer than the server keeps it.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=self.server.url, trust_env=False, timeout=30, limits=limits) as client:
            while not self._stop.is_set():
                started = time.monotonic()
                status = client.get("/reload/status")
                self.slow_status = max(self.slow_status, time.monotonic() - started)
                assert status.status_code == (200 if status.json()["serving"] else 503)
                assert client.get("/health").status_code == 200
                time.sleep(0.02)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for job in self._jobs:
            job.result()

    @property
    def completed(self) -> int:
        """How many answers have come to their end."""
        return sum(self.answers.values())
