"""A worker's end of the shm transport: buckets are read where the trainer has put them; see :mod:`.shm_sender`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import torch

from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.transports import local_links, sockets
from weightpush_protocol.transports.base import TransportConfig
from weightpush_protocol.transports.cuda_memory import map_gpu_memory
from weightpush_protocol.transports.local_links import Aborted, LinkError
from weightpush_protocol.transports.shared_memory import MemoryRefused, map_for_reading
from weightpush_protocol.transports.shm_endpoint import ShmEndpoint

_TRAINER: Final = 0


class ShmReceiver(ShmEndpoint):
    """A worker's end.

    Args:
        config: from the sender.
        rank: of this worker among all of the group, from 1.

    Raises:
        ValueError: ``config`` is of another transport, or ``rank`` is outside the group.
        WeightPushError: ``transport_unavailable``.
    """

    def __init__(self, config: TransportConfig, *, rank: int) -> None:
        if config.name != "shm":
            raise ValueError(f"transport {config.name!r} shares no memory")
        # A configuration of this transport has them.
        assert config.socket is not None
        assert config.key is not None
        assert config.world_size is not None
        assert config.buffers is not None
        assert config.buffer_bytes is not None
        if not 1 <= rank < config.world_size:
            raise ValueError(f"a worker's rank lies in 1..{config.world_size - 1}, got {rank}")
        super().__init__()
        self._rank = rank
        self._name, self._key = config.socket, config.key
        self._buffers, self._buffer_bytes = config.buffers, config.buffer_bytes
        self._gpu = config.gpu
        self._connection: socket.socket | None = None
        self._memory: torch.Tensor | None = None

    @property
    def _who(self) -> str:
        return f"shm receiver of worker rank {self._rank}"

    def _connections(self) -> Iterable[socket.socket]:
        connection = self._connection
        return () if connection is None else (connection,)

    def _join(self, deadline: float, timeout_s: float) -> None:
        late = f"did not get through the rendezvous within {timeout_s:g} s"
        connection = self._connection = local_links.connect(self._name, self._waiter, deadline)
        local_links.send(connection, local_links.hello(self._rank, self._key), _TRAINER)
        ticket, descriptors = self._await(local_links.MEMORY, deadline, late)
        try:
            self._memory = self._map(ticket, descriptors)
        except (LinkError, OSError) as error:
            text = f"worker rank {self._rank} cannot map the trainer's memory: {error}"
            refusal = LinkError(text, code=ErrorCode.TRANSPORT_UNAVAILABLE)
            with suppress(LinkError):
                local_links.send(connection, local_links.giving_up(ErrorCode.TRANSPORT_UNAVAILABLE, text), _TRAINER)
            raise refusal from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        local_links.send(connection, local_links.JOINED, _TRAINER)
        self._await(local_links.GO, deadline, late)

    def _map(self, ticket: bytes, descriptors: list[int]) -> torch.Tensor:
        nbytes = self._buffers * self._buffer_bytes
        try:
            if self._gpu is not None:
                return map_gpu_memory(ticket, self._gpu, nbytes)
            if not descriptors:
                raise LinkError("no descriptor came with it")
            return map_for_reading(descriptors[0], nbytes)
        except MemoryRefused as error:
            raise LinkError(str(error)) from error

    def _await(self, kind: bytes, deadline: float, late: str) -> tuple[bytes, list[int]]:
        """Wait for the next message, which must be of ``kind``; return its fields and descriptors."""
        connection = self._connection
        assert connection is not None
        while True:
            if not self._waiter.ready((connection,), deadline):
                raise LinkError(late, timed_out=True)
            try:
                found, fields, descriptors = local_links.receive(connection, _TRAINER)
            except BlockingIOError:
                continue
            except LinkError:
                if self._aborted:
                    raise Aborted from None
                raise
            if found == kind:
                return fields, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            raise LinkError("the trainer sent another message than was due", peer=_TRAINER)

    def borrow(self, number: int, nbytes: int, timeout_s: float) -> torch.Tensor:
        """Wait for bucket ``number`` and return it where it lies, see :class:`~.base.BorrowingReceiver`.

        Raises:
            WeightPushError: ``transport_failed``; the transport cannot be used again.
        """
        with self._busy:
            self._require_open()
            assert self._memory is not None
            what = f"worker rank {self._rank} did not receive bucket {number} ({nbytes} bytes)"
            late = f"it did not arrive within {timeout_s:g} s"
            try:
                fields, _ = self._await(local_links.BUCKET, time.monotonic() + timeout_s, late)
                sent, index, size = local_links.read_bucket(fields)
                if (sent, size) != (number, nbytes):
                    raise LinkError(f"the trainer sent bucket {sent} of {size} bytes instead")
                if index >= self._buffers or size > self._buffer_bytes:
                    raise LinkError(
                        f"the trainer says that it lies in buffer {index}, which is none that could hold it"
                    )
            except (LinkError, Aborted) as error:
                self._fail(what, error, late)
            start = index * self._buffer_bytes
            return self._memory[start : start + nbytes]

    def give_back(self, number: int) -> None:
        """Let the sender overwrite bucket ``number``. Never waits; without effect where the sender is gone."""
        connection = self._connection
        if connection is not None:
            with suppress(LinkError):
                local_links.send(connection, local_links.done(number), _TRAINER)

    def receive(self, number: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Fill ``buffer``, as long as the bucket, with bucket ``number``.

        Raises:
            ValueError: ``buffer`` is not a contiguous 1-d uint8 tensor where the memory lies.
            WeightPushError: ``transport_failed``; the transport cannot be used again.
        """
        self._check_buffer(buffer, "cpu" if self._gpu is None else "cuda")
        buffer.copy_(self.borrow(number, buffer.numel(), timeout_s))
        self.give_back(number)

    def check(self) -> None:
        """Raise ``transport_failed`` if the trainer has closed the connection; call it between buckets."""
        with self._busy:
            self._require_open()
            if any(map(sockets.is_closed_by_peer, self._connections())):
                error = LinkError("the trainer closed the connection", peer=_TRAINER)
                self._fail("the data plane is lost between two buckets", error, "")

    def _release(self) -> None:
        if self._connection is not None:
            local_links.finish(self._connection)
            self._connection = None
        self._memory = None
