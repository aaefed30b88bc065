"""What both ends of the shm transport share: opening once, failing once, aborting from any thread."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NoReturn

import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import local_links, rendezvous, sockets
from weightpush_protocol.transports.base import check_available
from weightpush_protocol.transports.local_links import Aborted, LinkError


class ShmEndpoint(ABC):
    """One end. One thread opens, sends or receives and closes; any thread may abort."""

    def __init__(self) -> None:
        check_available("shm", torch.device("cpu"))
        self._busy = threading.Lock()
        self._waiter = local_links.Waiter()
        self._opened = False
        self._aborted = False
        self._closed = False
        self._failure: str | None = None
        #: Set by whichever thread fails first; what others meet then is only the consequence.
        self._error: WeightPushError | None = None
        self._failing = threading.Lock()

    @property
    @abstractmethod
    def _who(self) -> str: ...

    @abstractmethod
    def _connections(self) -> Iterable[socket.socket]:
        """Return what connects to others now; called by any thread."""

    @abstractmethod
    def _join(self, deadline: float, timeout_s: float) -> None:
        """Meet the others. Raises :class:`LinkError` or :class:`Aborted`."""

    def open(self, timeout_s: float) -> None:
        """Meet all others and share the memory, in at most ``timeout_s`` seconds.

        Raises:
            WeightPushError: ``rendezvous_failed``: who is missing or gave up, or aborted; ``transport_unavailable``:
                the two ends cannot share memory.
        """
        with self._busy:
            if self._opened or self._closed or self._failure:
                raise RuntimeError(f"{self._who} can be opened only once")
            try:
                self._join(time.monotonic() + timeout_s, timeout_s)
                self._opened = True
            except Aborted:
                self._failure = f"{self._who} was aborted"
                raise rendezvous.failed(self._failure, aborted=True) from None
            except LinkError as error:
                self._failure = f"{self._who}: {error}"
                self._cut()
                raise self._not_opened(error) from error
            except OSError as error:
                self._failure = f"{self._who}: {error}"
                self._cut()
                raise rendezvous.failed(self._failure, error) from error

    def _not_opened(self, error: LinkError) -> WeightPushError:
        code = error.code if error.code is ErrorCode.TRANSPORT_UNAVAILABLE else ErrorCode.RENDEZVOUS_FAILED
        details: dict[str, object] = {"transport": "shm", "exception": "LinkError", "aborted": self._aborted}
        if error.missing:
            details["missing_ranks"] = error.missing
        if error.peer is not None:
            details["peer_rank"] = error.peer
        return WeightPushError(code, f"{self._who}: {error}", details=details)

    def _require_open(self) -> None:
        if self._aborted:
            raise self._failed(f"{self._who} was aborted", "Aborted")
        if self._failure:
            raise self._failed(f"{self._who} failed before: {self._failure}", "LinkError")
        if not self._opened:
            raise RuntimeError(f"{self._who} is not open")

    def _check_buffer(self, buffer: torch.Tensor, device_type: str) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"a bucket is a contiguous 1-d uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
        if buffer.device.type != device_type:
            raise ValueError(f"shm moves buckets on {device_type!r}, got one on {buffer.device}")

    def _fail(self, what: str, error: LinkError | Aborted, late: str) -> NoReturn:
        with self._failing:
            if self._error is None:
                self._error = self._describe(what, error, late)
                self._failure = self._error.message
                # The others need not wait for their own deadlines.
                self._cut()
            failure = self._error
        raise WeightPushError(failure.code, failure.message, details=failure.details) from error

    def _describe(self, what: str, error: LinkError | Aborted, late: str) -> WeightPushError:
        if isinstance(error, Aborted) or self._aborted:
            return self._failed(f"{what}: aborted", "Aborted")
        peer = {} if error.peer is None else {"peer_rank": error.peer}
        return self._failed(f"{what}: {late if error.timed_out else error}", "LinkError", **peer)

    def _failed(self, message: str, cause: str, **details: object) -> WeightPushError:
        return WeightPushError(
            ErrorCode.TRANSPORT_FAILED,
            message,
            details={"transport": "shm", "exception": cause, "aborted": self._aborted, **details},
        )

    def _cut(self) -> None:
        for connection in self._connections():
            sockets.cut(connection)

    def abort(self) -> None:
        """From any thread: return at once and make a pending or later call raise soon."""
        self._aborted = True
        self._waiter.wake()
        self._cut()

    def close(self) -> None:
        """Free the connections. A pending call of another thread is aborted first."""
        self._acquire(self._busy)
        try:
            self._closed = True
            self._failure = self._failure or "closed"
            self._release()
            self._waiter.close()
        finally:
            self._busy.release()

    def _acquire(self, lock: threading.Lock) -> None:
        if not lock.acquire(blocking=False):
            self.abort()
            lock.acquire()

    @abstractmethod
    def _release(self) -> None: ...
