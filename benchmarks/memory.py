"""Peak memory of trainer and servers while something runs, seen from outside.

Private memory is each process's ``RssAnon``. Memory that can be shared (POSIX shared memory, files in a RAM disk,
anonymous files) is counted for the whole machine (``Shmem`` in ``/proc/meminfo``), mapped by anybody or not: what the
trainer has mapped of it is the trainer's, the rest the server's.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_EVERY_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Look:
    """Bytes at one moment."""

    trainer: int
    server: int


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes: what both sides held before, and how much more at the worst moment."""

    trainer_before: int
    server_before: int
    trainer_extra: int
    server_extra: int


def parse_kib(text: str, name: str) -> int:
    """Return the bytes of the line ``name:  123 kB``; 0 where there is none."""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _status(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


class PeakWatch:
    """Looks every few milliseconds between entering and leaving; then ``peak`` is known."""

    def __init__(self, trainer: int, servers: Sequence[int]) -> None:
        self._trainer = trainer
        self._servers = list(servers)
        self._before = self._worst_trainer = self._worst_server = Look(0, 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-watch", daemon=True)

    def look(self) -> Look:
        """Return what both sides hold now."""
        trainer = _status(self._trainer)
        mapped = parse_kib(trainer, "RssShmem")
        shared = parse_kib(Path("/proc/meminfo").read_text(), "Shmem")
        private = sum(parse_kib(_status(pid), "RssAnon") for pid in self._servers)
        return Look(trainer=parse_kib(trainer, "RssAnon") + mapped, server=private + shared - mapped)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._note(self.look())

    def _note(self, now: Look) -> None:
        if now.trainer > self._worst_trainer.trainer:
            self._worst_trainer = now
        if now.server > self._worst_server.server:
            self._worst_server = now

    def __enter__(self) -> PeakWatch:
        self._before = self._worst_trainer = self._worst_server = self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._note(self.look())

    @property
    def peak(self) -> Peak:
        """Return the worst of what was seen."""
        return Peak(
            trainer_before=self._before.trainer,
            server_before=self._before.server,
            trainer_extra=self._worst_trainer.trainer - self._before.trainer,
            server_extra=self._worst_server.server - self._before.server,
        )
