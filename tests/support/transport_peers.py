"""Other processes for the transport tests: each holds endpoints of a transport and runs calls on request.

Every call runs in a thread of its own, so that one can be aborted by the next. A :class:`Peer` is a real process, which
can be killed or stopped.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.transports.base import BorrowingReceiver, TransportConfig
from weightpush_protocol.transports.collective import CollectiveSender
from weightpush_protocol.transports.endpoints import make_receiver
from weightpush_protocol.transports.shared_memory import SharedBuffers, host_id
from weightpush_protocol.transports.shm_sender import ShmSender

#: A sender of any transport of raw buckets.
AnySender = CollectiveSender | ShmSender
#: Of a sender that shares memory: how many, and how large.
SHARED_BUFFERS = 2
SHARED_BYTES = 18 * 2**20

# Forked from a process that has torch imported but started no thread: a new peer takes milliseconds, not seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["support.transport_peers"])


@lru_cache(maxsize=8)
def _ramp(nbytes: int) -> torch.Tensor:
    values = torch.arange(nbytes, dtype=torch.int32)
    return (values * 2654435 + (values >> 9)).to(torch.uint8)


def pattern(number: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` bytes that depend on the bucket's number and on their position."""
    return _ramp(nbytes) + (97 * number) % 256


def usage() -> dict[str, int]:
    """Return the numbers of threads and descriptors of this process."""
    return {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd")) - 1}


def make_sender(kind: str, world_size: int, *, host: str = "127.0.0.1", nbytes: int = SHARED_BYTES) -> AnySender:
    """Return a sender of transport ``kind``; its shared buffers, if it has any, hold ``nbytes`` bytes each."""
    if kind == "shm":
        return ShmSender(SharedBuffers(SHARED_BUFFERS, nbytes), world_size=world_size)
    return CollectiveSender("gloo", host=host, world_size=world_size)


class _Calls:
    """What a peer can be asked to do. ``name`` tells its endpoints apart."""

    def __init__(self) -> None:
        self.ends: dict[str, Any] = {}

    def ping(self) -> str:
        return "pong"

    def reset(self) -> None:
        """Close all endpoints."""
        for name in list(self.ends):
            self.close(name)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # The errors that were raised hold the endpoints, and those their memory.

    def usage(self) -> dict[str, int]:
        return usage()

    def default_group(self) -> str:
        """Give the process a default process group, as every vLLM worker has one."""
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return str(torch.distributed.get_backend())

    def sender(self, name: str, kind: str, world_size: int) -> TransportConfig:
        self.ends[name] = make_sender(kind, world_size)
        return self.ends[name].config

    def receiver(self, name: str, config: TransportConfig, rank: int) -> None:
        self.ends[name] = make_receiver(config, rank=rank)

    def open(self, name: str, timeout_s: float) -> None:
        self.ends[name].open(timeout_s)

    def receive(self, name: str, number: int, nbytes: int, timeout_s: float) -> str:
        buffer = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        self.ends[name].receive(number, buffer, timeout_s)
        return tensor_digest(buffer)

    def host_id(self) -> str:
        return host_id()

    def inode(self, name: str) -> int:
        """Return the number of the memory that a sender shares."""
        return os.fstat(self.ends[name]._memory.descriptor).st_ino

    def borrow(self, name: str, number: int, nbytes: int, timeout_s: float) -> str:
        """Look at a bucket where it lies, and keep it until it is given back."""
        end = self.ends[name]
        assert isinstance(end, BorrowingReceiver)
        return tensor_digest(end.borrow(number, nbytes, timeout_s))

    def give_back(self, name: str, number: int) -> None:
        self.ends[name].give_back(number)

    def lend_and_send(self, name: str, number: int, nbytes: int, timeout_s: float) -> None:
        buffer = self.ends[name].lend(nbytes, timeout_s)
        self.ends[name].send(number, buffer.copy_(pattern(number, nbytes)), timeout_s)

    def send(self, name: str, number: int, nbytes: int, timeout_s: float) -> None:
        self.ends[name].send(number, pattern(number, nbytes), timeout_s)

    def abort(self, name: str) -> None:
        self.ends[name].abort()

    def close(self, name: str) -> None:
        self.ends.pop(name).close()


def _serve(pipe: Connection) -> None:
    calls = _Calls()
    writing = threading.Lock()

    def run(ticket: int, call: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer: tuple[int, bool, Any] = (ticket, True, getattr(calls, call)(*arguments))
        except Exception as error:  # noqa: BLE001 - the test sees it
            answer = (ticket, False, error)
        with writing:
            pipe.send_bytes(pickle.dumps(answer))

    while True:
        try:
            request = pipe.recv()
        except EOFError:
            os._exit(0)
        threading.Thread(target=run, args=request, daemon=True).start()


class Peer:
    """A process of its own."""

    def __init__(self) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._tickets = 0

    def start(self, call: str, *arguments: Any) -> int:
        """Start a call and return its ticket for :meth:`result`."""
        self._tickets += 1
        self._pipe.send((self._tickets, call, arguments))
        return self._tickets

    def result(self, ticket: int, within_s: float = 90) -> Any:
        """Return what the call returned, or raise what it raised. Raises ``TimeoutError`` if it takes longer.

        The first call of a session waits for a process that imports torch: from a cold disk that takes its time.
        """
        deadline = time.monotonic() + within_s
        while ticket not in self._answers:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"call {ticket} still runs after {within_s} s")
            number, good, value = pickle.loads(self._pipe.recv_bytes())
            self._answers[number] = (good, value)
        good, value = self._answers.pop(ticket)
        if not good:
            raise value
        return value

    def call(self, call: str, *arguments: Any) -> Any:
        """Make a call and wait for it."""
        return self.result(self.start(call, *arguments))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill the process, also a stopped one."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


_idle: list[Peer] = []


@contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    """Lend ``count`` processes. One that does not answer afterwards (killed, stopped, stuck) is not used again."""
    lent = [_idle.pop() if _idle else Peer() for _ in range(count)]
    try:
        yield lent
    finally:
        for peer in lent:
            try:
                peer.result(peer.start("reset"), 2.0)
            except (OSError, EOFError, TimeoutError):
                peer.end()
            else:
                _idle.append(peer)
