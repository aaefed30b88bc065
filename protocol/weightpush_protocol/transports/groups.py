"""The process group of each collective backend: form it, broadcast with a deadline, abort it from another thread.

Both are private ``torch.distributed`` backend objects. They register nowhere, so the process may have a default group
of any backend, or none, and any number of these.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

# The names that torch.distributed passes on, from where they are typed.
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, Work

from weightpush_protocol.transports import sockets

#: Broadcasts are cut into pieces of this size, so that no backend meets a message of 2 GiB or more.
PIECE_BYTES: Final = 512 * 2**20
_OPERATION_MARGIN_S: Final = 2.0


class GroupError(Exception):
    """An operation of a group failed; the group cannot be used again.

    Attributes:
        cause: name of the exception type that the backend raised.
        timed_out: the deadline passed.
        peer: rank of the process whose connection broke; None where that cannot be told.
    """

    def __init__(self, message: str, cause: str, *, timed_out: bool = False, peer: int | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.timed_out = timed_out
        self.peer = peer


def rank_text(rank: int | None) -> str:
    """Name a process of the group for a message."""
    if rank is None:
        return "a peer"
    return f"worker rank {rank}" if rank else "the trainer"


class Group(Protocol):
    """A formed process group of one backend."""

    #: Local end of each connection, ``address:port``; tells others which rank an error is about.
    local_ends: list[str]

    def learn_peers(self, ranks: dict[str, int]) -> None:
        """Take the rank behind each remote end, to name it in errors. Raises :class:`GroupError` for a stranger's."""
        ...

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> None:
        """Broadcast a contiguous tensor from rank 0 and wait until it may be used. Raises :class:`GroupError`."""
        ...

    def gone(self) -> str | None:
        """Between operations: say whose connection is closed, or None if all are up or that cannot be told."""
        ...

    def abort(self) -> None:
        """From any thread: make pending and later operations fail soon; returns at once."""
        ...

    def close(self) -> None:
        """Free the group; no operation is pending."""
        ...


def form_group(
    backend: str, store: Store, address: str, rank: int, size: int, device: torch.device, timeout_s: float
) -> Group:
    """Form the group with all its processes, which do the same at the same time.

    ``address`` is this process's address for the others (Gloo; NCCL chooses its own interfaces). ``store`` must live as
    long as the group.

    Raises:
        GroupError: the others did not connect within ``timeout_s`` seconds.
    """
    prefixed = PrefixStore("group", store)
    try:
        if backend == "nccl":
            return NcclGroup(prefixed, rank, size, device, timeout_s)
        return GlooGroup(prefixed, address, rank, size, timeout_s)
    except RuntimeError as error:
        raise GroupError(
            f"the {backend} group of {size} processes did not form: {brief(error)}", _kind(error)
        ) from error


def brief(error: BaseException) -> str:
    """Return the first sentence of a backend's error, without its source position."""
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\]\s*", "", str(error)).partition("\n")[0]
    return text.partition(". This is typically")[0].strip() or type(error).__name__


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


class GlooGroup:
    """Gloo over TCP, CPU tensors.

    ``ProcessGroupGloo`` can neither cancel an operation nor be destroyed while one is pending, and it ends the process
    when a message has another size than its receiver expects. So the group knows its own TCP connections, which
    :meth:`abort` cuts: that ends the pending operation with an error. Its callers agree on sizes first.
    """

    def __init__(self, store: PrefixStore, address: str, rank: int, size: int, timeout_s: float) -> None:
        # The public alias `Options` cannot be constructed in every torch release.
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self._published = _published_addresses(store, size)
        self._connections: list[socket.socket] = []
        for connection in sockets.own_connections():
            if self._is_ours(connection):
                self._connections.append(connection)
            else:
                connection.close()
        self.local_ends = [_end(connection.getsockname()) for connection in self._connections]
        self._ranks: dict[str, int] = {}

    def learn_peers(self, ranks: dict[str, int]) -> None:
        """See :class:`Group`. Gloo itself takes whoever connects first; the others have said from where they did."""
        self._ranks.update(ranks)
        for connection in self._connections:
            with suppress(OSError):  # One that is gone by now belongs to nobody; the next operation says so.
                remote = _end(connection.getpeername())
                if remote not in ranks:
                    raise GroupError(f"{remote} connected, which is no process of this update", "Stranger")

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            ends = (sockets.wire_address(connection.getsockname()), sockets.wire_address(connection.getpeername()))
        except OSError:
            # Somebody else's, closed a moment ago.
            return False
        return any(end in published for end in ends for published in self._published)

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> None:
        """See :class:`Group`."""
        options = BroadcastOptions()
        options.timeout = timedelta(seconds=_left_s(deadline))
        try:
            work = self._group.broadcast([tensor], options)
            self._wait(work, deadline)
        except RuntimeError as error:
            text = brief(error)
            peer = self._peer_in(text)
            named = text if peer is None else f"{text} ({rank_text(peer)})"
            raise GroupError(named, _kind(error), timed_out="imed out" in text, peer=peer) from error

    def _wait(self, work: Work, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=_left_s(deadline) + _OPERATION_MARGIN_S))
        except RuntimeError:
            if work.is_completed():
                raise
            # Gloo's own limit did not end it. The tensor is Gloo's until it ends.
            self.abort()
            work.wait()

    def _peer_in(self, text: str) -> int | None:
        """Return the rank of the peer that an error names by its address."""
        found = re.search(r"\[([0-9a-fA-F.:%\w]+)\]:(\d+)", text)
        if found is None:
            return None
        host, port = found[1].removeprefix("::ffff:"), int(found[2])
        # Gloo prints ports as they are on the wire, with their bytes swapped on the machines we run on.
        ranks = (self._rank_at(peer) for peer in ((host, socket.ntohs(port)), (host, port)))
        return next((rank for rank in ranks if rank is not None), None)

    def _rank_at(self, peer: sockets.Endpoint) -> int | None:
        known = self._ranks.get(_end(peer))
        if known is not None:
            return known
        with suppress(OSError):
            address = sockets.wire_address(peer)
            return next((rank for rank, published in enumerate(self._published) if address in published), None)
        return None

    def gone(self) -> str | None:
        """See :class:`Group`. Only looks: what a peer has sent stays for Gloo to read."""
        for connection in self._connections:
            if sockets.is_closed_by_peer(connection):
                with suppress(OSError):
                    return rank_text(self._rank_at(connection.getpeername()[:2]))
                return rank_text(None)
        return None

    def abort(self) -> None:
        """See :class:`Group`."""
        for connection in self._connections:
            sockets.cut(connection)

    def close(self) -> None:
        """See :class:`Group`."""
        self._group = None
        for connection in self._connections:
            connection.close()


def _end(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _published_addresses(store: PrefixStore, size: int) -> list[bytes]:
    """Return what each rank's Gloo published about itself; it contains the address that the rank listens on."""
    # Should another torch release store this elsewhere, an abort still ends with the operation's own time limit.
    names = [f"0/{rank}" for rank in range(size)]
    return [bytes(store.get(name)) for name in names] if store.check(names) else []


class NcclGroup:
    """NCCL, tensors on one CUDA device.

    An operation starts after what the calling thread's current stream of that device holds, and :meth:`broadcast`
    returns on the host when it has finished, so that the bytes are valid on every stream.

    torch's NCCL watchdog would end the whole process, here a trainer or a vLLM worker, when a peer dies. It is told at
    construction to leave errors to the waiting loop of this class, which aborts the communicator.
    """

    def __init__(self, store: PrefixStore, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._aborted = threading.Event()
        self.local_ends: list[str] = []
        options: Any = dist.ProcessGroupNCCL.Options()
        # Only the loop in _wait decides that time is over.
        options._timeout = timedelta(days=1)
        with torch.cuda.device(self._device), _errors_left_to_us():
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(self._device)
        self._confirm(time.monotonic() + timeout_s)

    def learn_peers(self, ranks: dict[str, int]) -> None:
        """See :class:`Group`; NCCL's errors name no peer."""

    def _confirm(self, deadline: float) -> None:
        """Run the first operation, in which NCCL makes its connections."""
        try:
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device), deadline)
        except GroupError:
            self.abort()
            raise

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> None:
        """See :class:`Group`."""
        options = BroadcastOptions()
        try:
            with torch.cuda.device(self._device):
                work = self._group.broadcast([tensor], options)
                # On the host this returns at once: the current stream waits, and the event tells when it is through.
                work.wait()
                finished = torch.Event(self._device)
                finished.record()
                self._wait(work, finished, deadline)
        except RuntimeError as error:
            raise GroupError(brief(error), _kind(error)) from error

    def _wait(self, work: Work, finished: torch.Event, deadline: float) -> None:
        pause = 0.00005
        done_at: float | None = None
        while not finished.query():
            if self._aborted.is_set():
                raise GroupError("aborted", "Aborted")
            now = time.monotonic()
            if now >= deadline:
                self.abort()
                raise GroupError("timed out", "TimeoutError", timed_out=True)
            self._check_error()
            # Work that failed counts as completed too, but its kernel never finishes.
            if done_at is None and work.is_completed():
                done_at = now
            if done_at is not None and now - done_at > _OPERATION_MARGIN_S:
                self.abort()
                raise GroupError("the communicator reported an error; see NCCL's log", "DistBackendError")
            time.sleep(pause)
            pause = min(2 * pause, 0.002)
        # An aborted kernel ends as well, with anything in its buffer.
        self._check_error()
        if self._aborted.is_set():
            raise GroupError("aborted", "Aborted")

    def _check_error(self) -> None:
        error = self._group.get_error()
        if error.name != "SUCCESS":
            self.abort()
            raise GroupError(f"NCCL reported {error.name}; a peer may be gone", "DistBackendError")

    def gone(self) -> str | None:
        """See :class:`Group`; NCCL shows no connections."""
        return None

    def abort(self) -> None:
        """See :class:`Group`."""
        if self._aborted.is_set():
            return
        self._aborted.set()
        # Aborting a communicator can itself take long.
        threading.Thread(target=self._group.abort, name="weightpush-nccl-abort", daemon=True).start()

    def close(self) -> None:
        """See :class:`Group`."""
        if not self._aborted.is_set():
            with suppress(RuntimeError):
                self._group.shutdown()
        self._group = None


_environment_lock = threading.Lock()


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    # These have no per-group form; torch reads them in the constructor.
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    with _environment_lock:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
