"""Buckets by broadcast in a process group of our own: ``gloo`` on CPU buffers, ``nccl`` on CUDA buffers.

The trainer is rank 0. Before the bytes of a bucket comes a header of fixed size with its number and length; so a
sender and a receiver that do not mean the same bucket find out before any byte of it is written.

The thread rules are those of :mod:`.base`: one thread opens, sends or receives and closes; any thread may abort.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Final, Literal, NoReturn

import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import groups, rendezvous, sockets
from weightpush_protocol.transports.base import TransportConfig, check_available
from weightpush_protocol.transports.cancellable import Cancelled, run_cancellable
from weightpush_protocol.transports.keyed_store import KeyedStore

CollectiveName = Literal["gloo", "nccl"]

_OPEN_MARGIN_S: Final = 1.0


class _Endpoint(ABC):
    """What sender and receiver share: opening once, failing once, aborting from any thread."""

    def __init__(self, backend: CollectiveName, rank: int, world_size: int, device: torch.device) -> None:
        check_available(backend, device)
        self._backend = backend
        self._rank = rank
        self._world_size = world_size
        # Gloo's buffers lie on the CPU whatever the model is on.
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._busy = threading.Lock()
        self._cancel = threading.Event()
        self._aborted = False
        self._closed = False
        self._failure: str | None = None
        self._group: groups.Group | None = None

    @abstractmethod
    def _meet(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[KeyedStore, str]:
        """Wait for the others; return the group's store and this process's address."""

    @abstractmethod
    def _cut_rendezvous(self) -> None: ...

    @property
    @abstractmethod
    def _who(self) -> str: ...

    def open(self, timeout_s: float) -> None:
        """Meet all others and form the group, in at most ``timeout_s`` seconds.

        Raises:
            WeightPushError: ``rendezvous_failed``: who is missing, unreachable or not admitted, or aborted.
        """
        with self._busy:
            if self._closed or self._group is not None or self._failure:
                raise RuntimeError(f"{self._who} can be opened only once")
            deadline = time.monotonic() + timeout_s
            try:
                self._group = run_cancellable(
                    lambda: self._form(deadline, timeout_s),
                    cancel=self._cancel,
                    deadline=deadline + _OPEN_MARGIN_S,
                    cut=self._cut_rendezvous,
                    discard=lambda group: group.close(),
                    name=f"weightpush-{self._backend}-open",
                )
                if self._aborted:
                    self._group.abort()
                    raise Cancelled("aborted")
            except Cancelled:
                reason = (
                    "was aborted" if self._aborted else f"did not get through the rendezvous within {timeout_s:g} s"
                )
                self._failure = f"{self._who} {reason}"
                raise rendezvous.failed(self._failure, aborted=self._aborted, **self._known()) from None
            except WeightPushError as error:
                self._failure = error.message
                raise
            except groups.GroupError as error:
                self._failure = f"{self._who}: {error}"
                raise rendezvous.failed(self._failure, exception=error.cause) from error
            except RuntimeError as error:
                # The store's errors (DistError).
                self._failure = f"{self._who} lost the rendezvous: {groups.brief(error)}"
                raise rendezvous.failed(self._failure, error) from error

    def _known(self) -> dict[str, Any]:
        """Return what this end can tell of a rendezvous that it left, for the error's details."""
        return {}

    def _form(self, deadline: float, timeout_s: float) -> groups.Group:
        store, address = self._meet(self._cancel, deadline, timeout_s)
        left = max(1.0, deadline - time.monotonic())
        group = groups.form_group(self._backend, store, address, self._rank, self._world_size, self._device, left)
        # Rank 0 is connected to all when it gets here, but two workers may still be connecting to each other through
        # the store that rank 0 may close.
        try:
            group.learn_peers(self._confirm_formed(store, group.local_ends, self._cancel, deadline))
        except (Cancelled, WeightPushError, groups.GroupError, RuntimeError):
            group.close()
            raise
        return group

    @abstractmethod
    def _confirm_formed(
        self, store: KeyedStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        """Wait until all have formed the group; return the rank behind each end of a connection."""

    def _check_buffer(self, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"a bucket is a contiguous 1-d uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
        if buffer.device.type != self._device.type:
            raise ValueError(f"{self._backend} moves buckets on {self._device.type!r}, got one on {buffer.device}")

    def _header(self, number: int, nbytes: int) -> torch.Tensor:
        return torch.tensor([number, nbytes], dtype=torch.int64, device=self._device)

    def _require_group(self) -> groups.Group:
        if self._aborted:
            raise self._failed(f"{self._who} was aborted", "Aborted")
        if self._failure:
            raise self._failed(f"{self._who} failed before: {self._failure}", "GroupError")
        if self._group is None:
            raise RuntimeError(f"{self._who} is not open")
        return self._group

    def _broadcast(self, group: groups.Group, tensor: torch.Tensor, deadline: float) -> None:
        for start in range(0, tensor.numel(), groups.PIECE_BYTES):
            group.broadcast(tensor[start : start + groups.PIECE_BYTES], deadline)

    def _failed(self, message: str, cause: str, **details: object) -> WeightPushError:
        return WeightPushError(
            ErrorCode.TRANSPORT_FAILED,
            message,
            details={"transport": self._backend, "exception": cause, "aborted": self._aborted, **details},
        )

    def _fail(self, group: groups.Group, what: str, late: str, error: groups.GroupError) -> NoReturn:
        # The group is of no use to anybody now; the others need not wait for their own deadlines.
        group.abort()
        if self._aborted:
            self._failure = f"{what}: aborted"
        elif error.timed_out:
            self._failure = f"{what}: {late}"
        else:
            self._failure = f"{what}: {error}"
        peer = {} if error.peer is None else {"peer_rank": error.peer}
        raise self._failed(self._failure, error.cause, **peer) from error

    def abort(self) -> None:
        """From any thread: return at once and make a pending or later call raise soon."""
        self._aborted = True
        self._cancel.set()
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Free the group and the rendezvous. A pending call of another thread is aborted first."""
        if not self._busy.acquire(blocking=False):
            self.abort()
            self._busy.acquire()
        try:
            self._closed = True
            if self._group is not None:
                self._group.close()
            self._failure = self._failure or "closed"
            self._group = None
            self._release()
        finally:
            self._busy.release()

    @abstractmethod
    def _release(self) -> None: ...


class CollectiveSender(_Endpoint):
    """The trainer's end of a ``gloo`` or ``nccl`` transport; listens for workers from construction on.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        host: this machine's address as the workers see it (see :func:`~.sockets.pick_host`), or a name for it.
        world_size: the trainer and all workers of all servers.
        device: where buckets lie, for ``nccl``; ``gloo`` takes CPU buckets whatever is given.

    Raises:
        WeightPushError: ``transport_unavailable``, or ``rendezvous_failed`` where ``host`` is not this machine's.
    """

    def __init__(
        self, backend: CollectiveName, *, host: str, world_size: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(backend, 0, world_size, torch.device(device))
        host = sockets.plain_host(host)
        key = secrets.token_hex(32)
        self._rendezvous = rendezvous.RendezvousServer(host, key, world_size)
        self._config = TransportConfig(
            name=backend, host=host, port=self._rendezvous.port, world_size=world_size, key=key
        )

    @property
    def config(self) -> TransportConfig:
        """What receivers need. With several servers, give each a copy with its own ``rank_offset``."""
        return self._config

    @property
    def _who(self) -> str:
        return f"{self._backend} sender"

    def _meet(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[KeyedStore, str]:
        return self._rendezvous.gather(cancel, deadline, timeout_s)

    def _known(self) -> dict[str, Any]:
        return {"missing_ranks": self._rendezvous.awaited()}

    def _confirm_formed(
        self, store: KeyedStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        return self._rendezvous.confirm_formed(store, ends, cancel, deadline)

    def _cut_rendezvous(self) -> None:
        self._rendezvous.cut()

    def _release(self) -> None:
        self._rendezvous.close()

    def send(self, number: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Broadcast bucket ``number``. When it returns, ``buffer`` may be changed; workers may still be receiving.

        On CUDA it starts after what the current stream holds and returns when the buffer has been read.

        Raises:
            ValueError: ``buffer`` is not a contiguous 1-d uint8 tensor on this transport's device.
            WeightPushError: ``transport_failed``; the transport cannot be used again.
        """
        with self._busy:
            group = self._require_group()
            self._check_buffer(buffer)
            deadline = time.monotonic() + timeout_s
            what = f"bucket {number} ({buffer.numel()} bytes) was not sent"
            try:
                group.broadcast(self._header(number, buffer.numel()), deadline)
                self._broadcast(group, buffer, deadline)
            except groups.GroupError as error:
                self._fail(group, what, f"not all workers took it within {timeout_s:g} s", error)


class CollectiveReceiver(_Endpoint):
    """A worker's end of a ``gloo`` or ``nccl`` transport.

    Args:
        config: from the sender; ``config.name`` says which backend.
        rank: of this worker among all of the group, from 1.
        device: where buckets lie, for ``nccl``; ``gloo`` takes CPU buckets whatever is given.

    Raises:
        ValueError: ``config`` is of another transport, or ``rank`` is outside the group.
        WeightPushError: ``transport_unavailable``.
    """

    def __init__(self, config: TransportConfig, *, rank: int, device: torch.device | str = "cpu") -> None:
        if config.name not in ("gloo", "nccl"):
            raise ValueError(f"{config.name} is not a collective transport")
        if config.host is None or config.port is None or config.world_size is None or config.key is None:
            raise ValueError(f"transport {config.name!r} needs host, port, world_size and key")
        if not 1 <= rank < config.world_size:
            raise ValueError(f"a worker's rank lies in 1..{config.world_size - 1}, got {rank}")
        super().__init__(config.name, rank, config.world_size, torch.device(device))
        self._rendezvous = rendezvous.RendezvousClient(config.host, config.port, config.key, rank)

    @property
    def _who(self) -> str:
        return f"{self._backend} receiver of worker rank {self._rank}"

    def _meet(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[KeyedStore, str]:
        return self._rendezvous.join(cancel, deadline, timeout_s)

    def _confirm_formed(
        self, store: KeyedStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        return self._rendezvous.confirm_formed(store, ends, cancel, deadline)

    def _cut_rendezvous(self) -> None:
        self._rendezvous.cut()

    def _release(self) -> None:
        self._rendezvous.close()

    def receive(self, number: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Fill ``buffer``, as long as the bucket, with bucket ``number``.

        Its bytes are valid only when this returns without an error; then nothing writes to it any more. On CUDA the
        write starts after what the current stream holds and has finished for every stream on return.

        Raises:
            ValueError: ``buffer`` is not a contiguous 1-d uint8 tensor on this transport's device.
            WeightPushError: ``transport_failed``; the transport cannot be used again.
        """
        with self._busy:
            group = self._require_group()
            self._check_buffer(buffer)
            deadline = time.monotonic() + timeout_s
            what = f"worker rank {self._rank} did not receive bucket {number} ({buffer.numel()} bytes)"
            try:
                header = self._header(-1, -1)
                group.broadcast(header, deadline)
                sent, nbytes = header.tolist()
                if (sent, nbytes) != (number, buffer.numel()):
                    message = f"the trainer sent bucket {sent} of {nbytes} bytes instead"
                    raise groups.GroupError(message, "BucketMismatch")
                self._broadcast(group, buffer, deadline)
            except groups.GroupError as error:
                self._fail(group, what, f"it did not arrive within {timeout_s:g} s", error)

    def check(self) -> None:
        """Raise ``transport_failed`` if the connection to a peer is closed; call it between buckets."""
        with self._busy:
            group = self._require_group()
            if (peer := group.gone()) is not None:
                error = groups.GroupError(f"{peer} closed the connection", "ConnectionClosed")
                self._fail(group, "the data plane is lost between two buckets", "", error)
