"""Trainer processes that meet faults: forked from one warm process, so that hundreds cost seconds.

A trainer pushes a checkpoint with ``WeightPusher``, as any other. At ``pause_at`` it says so and waits to be let go. If
``corruption`` is set it spoils what bucket number ``bucket`` brings, after its digests were taken.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from faults.checks import Outcome
from faults.plan import Fault
from weightpush_client import PushError, PushProgress, WeightPusher, delivery
from weightpush_protocol.digest_text import DIGEST_BYTES
from weightpush_protocol.messages import Deadlines
from weightpush_protocol.transports import sockets

BUCKET_BYTES: Final = 40_000
#: For faults that deadlines must end: short enough for many of them.
SHORT: Final = Deadlines(rendezvous_s=10, bucket_s=10, drain_s=5, commit_s=20, lease_s=2)
#: For all others: long enough for two cores that others use as well.
LONG: Final = Deadlines(rendezvous_s=30, bucket_s=30, drain_s=5, commit_s=60, lease_s=20)

#: By name, or over shm as bytes in the order of the bucket.
_Digests = TypeVar("_Digests", dict[str, str], bytes)

_FORKS: Final = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Job:
    """One push; or, as ``deed`` says, a reload of ``directory`` by the server itself (``disk``), or a ``rollback``.

    ``pause_at`` is a phase of the client, or ``stream:3``: three buckets are there."""

    url: str
    directory: Path
    version: str
    token: str | None
    transport: str = "http"
    deed: str = "push"
    mode: str = "direct"
    in_flight: str = "wait"
    pause_at: str | None = None
    corruption: Fault | None = None
    bucket: int = 0
    deadlines: Deadlines = field(default_factory=lambda: LONG)


class Trainer:
    """A trainer process, from the outside."""

    def __init__(self, job: Job) -> None:
        # Whoever runs tests may have other modules loaded; the children need only what a trainer needs.
        _FORKS.set_forkserver_preload(["faults.trainers"])
        self.job = job
        self._conn, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_main, args=(theirs, job), daemon=True)
        self._process.start()
        theirs.close()
        self.struck = False
        self._outcome: Outcome | None = None

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return not self._process.is_alive()

    def wait_paused(self, timeout_s: float) -> bool:
        """Wait until it has reached ``pause_at``; ``False`` if it ended before."""
        return self._listen("paused", timeout_s)

    def go(self) -> None:
        """Let it go on from its pause."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # It is dead.
            self._conn.send("go")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join(10)

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def result(self, timeout_s: float) -> Outcome | None:
        """Wait for its end; None for one that was killed.

        Raises:
            TimeoutError: it hangs.
        """
        self._listen("ended", timeout_s)
        self._process.join(max(timeout_s, 1))
        if self._process.is_alive():
            raise TimeoutError(f"the trainer of {self.job.version} did not end within {timeout_s:g} s")
        return self._outcome

    def close(self) -> None:
        """Kill it if it lives, and forget it."""
        self.kill()
        self._process.close()
        self._conn.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def _listen(self, wanted: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._conn.poll(max(0.0, deadline - time.monotonic())):
            try:
                kind, value = self._conn.recv()
            except (EOFError, OSError):
                return False
            if kind == "ended":
                self._outcome = value
            if kind == "struck":
                self.struck = True
            if kind in (wanted, "ended"):
                return bool(kind == wanted)
        if wanted == "ended":
            raise TimeoutError(f"the trainer of {self.job.version} did not end within {timeout_s:g} s")
        raise TimeoutError(f"the trainer of {self.job.version} did not get to {self.job.pause_at}")


# The child


def _main(conn: Connection, job: Job) -> None:
    def pause(progress: PushProgress) -> None:
        if job.pause_at in (progress.phase.value, f"{progress.phase.value}:{progress.bucket}"):
            conn.send(("paused", None))
            conn.recv()

    if job.corruption is not None:
        for name in ("deliver_by_body", "deliver_by_broadcast", "deliver_by_sharing"):
            setattr(delivery, name, _spoiled(getattr(delivery, name), job, lambda: conn.send(("struck", None))))
    conn.send(("ended", _push(job, pause)))


def _push(job: Job, pause: Callable[[PushProgress], None]) -> Outcome:
    try:
        with WeightPusher(
            job.url,
            token=job.token,
            transport=job.transport,
            mode=job.mode,
            in_flight=job.in_flight,
            deadlines=job.deadlines,
            bucket_bytes=BUCKET_BYTES,
        ) as pusher:
            match job.deed:
                case "disk":
                    update_id = pusher.push_from_disk(job.directory, weight_version=job.version)[0].update_id
                case "rollback":
                    update_id = pusher.rollback()[0].update_id
                case _:
                    update_id = pusher.push(job.directory, weight_version=job.version, progress=pause).update_id
        return Outcome(True, update_id=update_id)
    except PushError as error:
        return Outcome(False, error.code.value, error.message, error.update_id)
    except Exception as error:  # noqa: BLE001 - an error without a code is a finding, and must be told as one
        return Outcome(False, None, f"{type(error).__name__}: {error}")


def _spoiled(deliver: Callable[..., None], job: Job, struck: Callable[[], None]) -> Callable[..., None]:
    """Return ``deliver`` (its last arguments: number, buffer, digests), spoiling bucket ``job.bucket``."""

    def spoiling(*args: Any) -> None:
        *head, number, buffer, digests = args
        if number != job.bucket:
            deliver(*args)
            return
        if job.corruption is Fault.SWAP_TENSORS:
            spoilt, mixed = swapped(buffer, digests)
            if torch.equal(spoilt, buffer) and mixed == digests:
                deliver(*args)  # All tensors of this bucket are alike.
                return
            buffer, digests = spoilt, mixed
        struck()
        match job.corruption:
            case Fault.FLIP_BYTE:
                buffer[buffer.numel() // 2] ^= 0x10
            case Fault.TRUNCATE:
                buffer = buffer[:-8]
            case Fault.REPEAT:
                deliver(*args)
            case Fault.REORDER:
                number += 1
            case Fault.CUT_DATA:
                port = int(job.url.rpartition(":")[2])
                for connection in sockets.own_connections():
                    with contextlib.closing(connection), contextlib.suppress(OSError):
                        if port not in (connection.getsockname()[1], connection.getpeername()[1]):
                            sockets.cut(connection)
        deliver(*head, number, buffer, digests)

    return spoiling


def swapped(buffer: torch.Tensor, digests: _Digests) -> tuple[torch.Tensor, _Digests]:
    """Return a bucket whose bytes and digests are in each other's place: of two tensors, or of one tensor's halves."""
    if isinstance(digests, bytes):
        if len(digests) > DIGEST_BYTES:
            return buffer, digests[-DIGEST_BYTES:] + digests[DIGEST_BYTES:-DIGEST_BYTES] + digests[:DIGEST_BYTES]
    elif len(digests) > 1:
        names = list(digests)
        return buffer, {**digests, names[0]: digests[names[-1]], names[-1]: digests[names[0]]}
    half = buffer.numel() // 2
    return torch.cat((buffer[half:], buffer[:half])), digests
