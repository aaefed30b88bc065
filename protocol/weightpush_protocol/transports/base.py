"""What every transport of raw buckets offers, and what two ends must know of each other.

A transport moves a numbered bucket, a 1-d ``uint8`` tensor whose size both ends know from the manifest, from the
trainer to all workers. One update uses one sender and, in each worker, one receiver; they are opened once, at the same
time, and a transport that failed is closed and never used again.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Final, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from weightpush_protocol.errors import ErrorCode, WeightPushError

TransportName = Literal["shm", "gloo", "nccl", "http"]

#: What each transport with a rendezvous cannot do without.
_NEEDED: Final = {
    "shm": ("socket", "buffers", "buffer_bytes", "world_size", "key"),
    "gloo": ("host", "port", "world_size", "key"),
    "nccl": ("host", "port", "world_size", "key"),
}


class TransportConfig(BaseModel):
    """What a receiver needs to find its sender; travels in ``begin``.

    Attributes:
        name: which transport.
        host: ``gloo``, ``nccl``: address or host name of the trainer's rendezvous, as seen from the server; IPv6
            without brackets.
        port: TCP port of the rendezvous.
        socket: ``shm``: name of the trainer's socket among the abstract ones of its network namespace.
        buffers: number of buffers in the trainer's shared memory.
        buffer_bytes: size of each; buffer *i* begins at byte ``i * buffer_bytes``.
        gpu: ``shm``: the GPU that the memory lies on (a UUID), where it is not the host's.
        world_size: number of processes in the group: the trainer and all workers of all servers.
        rank_offset: rank of this server's first worker; the trainer is rank 0.
        key: secret of this update, 32 to 64 hex digits. Only processes that hold it find the rendezvous. It appears in
            the wire form, never in ``repr`` or in validation errors. It keeps strangers and old workers out; it does
            not encrypt, so the network between trainer and workers must be trusted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: TransportName
    host: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\s/@\[\]]+$")] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    world_size: Annotated[int, Field(ge=2, le=65536)] | None = None
    socket: Annotated[str, Field(pattern=r"^weightpush-[0-9a-f]{32}$")] | None = None
    buffers: Annotated[int, Field(ge=1, le=8)] | None = None
    buffer_bytes: Annotated[int, Field(ge=64, le=2**50, multiple_of=64)] | None = None
    gpu: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z-]+$")] | None = None
    rank_offset: Annotated[int, Field(ge=1)] = 1
    key: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F]{32,64}$", repr=False)] = None

    @field_validator("host", mode="before")
    @classmethod
    def _without_brackets(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            return value[1:-1]
        return value

    @field_validator("host")
    @classmethod
    def _can_be_looked_up(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                value.encode("idna")
            except UnicodeError as error:
                raise ValueError(f"no host name: {error}") from None
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> TransportConfig:
        missing = [field for field in _NEEDED.get(self.name, ()) if getattr(self, field) is None]
        if missing:
            raise ValueError(f"transport {self.name!r} needs {', '.join(missing)}")
        if self.world_size is not None and self.rank_offset >= self.world_size:
            raise ValueError(f"rank_offset {self.rank_offset} leaves no rank in a world of {self.world_size}")
        return self


@runtime_checkable
class Sender(Protocol):
    """The trainer's end. All methods but :meth:`abort` are called by one thread at a time.

    Failures are ``WeightPushError`` with ``rendezvous_failed`` (:meth:`open`), ``transport_failed`` (:meth:`send`) or
    ``transport_unavailable``.
    """

    @property
    def config(self) -> TransportConfig:
        """What receivers need; known before :meth:`open`."""
        ...

    def open(self, timeout_s: float) -> None:
        """Wait until all receivers are connected, at most ``timeout_s`` seconds."""
        ...

    def send(self, number: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Send bucket ``number``. When it returns, ``buffer`` may be changed; receivers may still be receiving."""
        ...

    def abort(self) -> None:
        """From any thread: return at once and make a pending or later ``open`` or ``send`` raise soon."""
        ...

    def close(self) -> None:
        """Free everything. May be called twice, and without ``open``."""
        ...


@runtime_checkable
class Receiver(Protocol):
    """A worker's end; threads and errors as in :class:`Sender`."""

    def open(self, timeout_s: float) -> None:
        """Wait until sender and all other receivers are connected, at most ``timeout_s`` seconds."""
        ...

    def receive(self, number: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Fill ``buffer`` with bucket ``number``. Its bytes are valid only when this returns without an error."""
        ...

    def check(self) -> None:
        """Between buckets: raise ``transport_failed`` if a peer is known to be gone. Never waits."""
        ...

    def abort(self) -> None:
        """From any thread: return at once and make a pending or later ``open`` or ``receive`` raise soon."""
        ...

    def close(self) -> None:
        """Free everything. May be called twice, and without ``open``."""
        ...


@runtime_checkable
class LendingSender(Sender, Protocol):
    """A sender with buffers that workers see: what is written into one of them is sent without another copy."""

    def lend(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """Return ``nbytes`` bytes to fill and to :meth:`send`, once all workers are done with what they held.

        Buffers are sent in the order in which they were lent. May be called by another thread than :meth:`send`.

        Raises:
            WeightPushError: ``transport_failed``, naming the worker that still holds them after ``timeout_s`` seconds.
        """
        ...


@runtime_checkable
class BorrowingReceiver(Receiver, Protocol):
    """A receiver that can show a bucket where the sender has put it."""

    def borrow(self, number: int, nbytes: int, timeout_s: float) -> torch.Tensor:
        """Wait for bucket ``number`` and return its bytes, which nobody may write to, until :meth:`give_back`."""
        ...

    def give_back(self, number: int) -> None:
        """Let the sender overwrite bucket ``number``. Never waits; without effect where the sender is gone."""
        ...


def check_available(name: TransportName, device: torch.device) -> None:
    """Check that this process can use a transport whose buckets lie on ``device``.

    ``shm`` and ``gloo`` move CPU buffers, also in a process whose model is on a GPU.

    Raises:
        WeightPushError: ``transport_unavailable``, with the reason.
    """
    reason = _why_unavailable(name, device)
    if reason:
        raise WeightPushError(
            ErrorCode.TRANSPORT_UNAVAILABLE,
            f"transport {name!r} cannot run here: {reason}",
            details={"transport": name, "device": str(device), "reason": reason},
        )


def _why_unavailable(name: TransportName, device: torch.device) -> str | None:
    if name == "http":
        return None
    if name == "shm":
        there = sys.platform == "linux" and hasattr(os, "memfd_create")
        return None if there else "shared buffers need Linux; use 'gloo' or 'http'"
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if name == "gloo":
        return None if dist.is_gloo_available() else "this torch was built without Gloo"
    if not dist.is_nccl_available():
        return "this torch was built without NCCL; use 'gloo' or 'http'"
    if device.type != "cuda":
        return f"NCCL needs weights on a CUDA device, they are on {device.type!r}; use 'gloo' or 'http'"
    if not torch.cuda.is_available():
        return "no CUDA device is visible; use 'gloo' or 'http'"
    return None
