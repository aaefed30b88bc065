"""The trainer's end of the shm transport: buckets in memory that the workers on its host share.

The trainer makes the memory (:mod:`.shared_memory`) and hands it to each worker over a connection
(:mod:`.local_links`). A bucket is announced by its place; each worker says when it is done with it, and a buffer is
filled again when all are. With two buffers the next bucket is gathered while the one before lands.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import torch

from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.transports import local_links
from weightpush_protocol.transports.base import TransportConfig
from weightpush_protocol.transports.local_links import Aborted, LinkError
from weightpush_protocol.transports.shared_memory import ShownBuffers
from weightpush_protocol.transports.shm_endpoint import ShmEndpoint

_TRAINER: Final = 0


class ShmSender(ShmEndpoint):
    """The trainer's end; listens for workers from construction on.

    Args:
        memory: where buckets lie; the caller's, who may use it again for a later update once this one has succeeded.
        world_size: the trainer and all workers of all servers.

    Raises:
        WeightPushError: ``transport_unavailable``.
    """

    def __init__(self, memory: ShownBuffers, *, world_size: int) -> None:
        super().__init__()
        self._memory = memory
        self._members: dict[int, socket.socket] = {}
        self._lending = threading.Lock()
        #: Guards what lies where, which both threads look at.
        self._places = threading.Lock()
        #: For each buffer the workers that still read it; None while it is lent.
        self._readers: list[set[int] | None] = [set() for _ in range(memory.count)]
        self._numbers: dict[int, int] = {}
        self._lent: deque[int] = deque()
        self._next = 0
        name, key = f"weightpush-{secrets.token_hex(16)}", secrets.token_hex(32)
        self._key = key
        self._config = TransportConfig(
            name="shm",
            socket=name,
            buffers=memory.count,
            buffer_bytes=memory.buffer_bytes,
            gpu=memory.gpu or None,
            world_size=world_size,
            key=key,
        )
        self._world_size = world_size
        self._listener = local_links.listen(name)

    @property
    def config(self) -> TransportConfig:
        """What receivers need. With several servers, give each a copy with its own ``rank_offset``."""
        return self._config

    @property
    def _who(self) -> str:
        return "shm sender"

    def _connections(self) -> Iterable[socket.socket]:
        return tuple(self._members.values())

    # meeting the workers

    def _join(self, deadline: float, timeout_s: float) -> None:
        strangers: list[socket.socket] = []
        joined: set[int] = set()
        try:
            while len(joined) < self._world_size - 1:
                ranks = {connection: rank for rank, connection in self._members.items()}
                ready = self._waiter.ready([self._listener, *strangers, *ranks], deadline)
                if not ready:
                    raise self._nobody(set(range(1, self._world_size)) - joined, f"within {timeout_s:g} s")
                for connection in ready:
                    if connection is self._listener:
                        self._accept(strangers)
                    elif connection in ranks:
                        self._hear_join(ranks[connection], connection, joined)
                    else:
                        strangers.remove(connection)
                        self._admit(connection)
            for rank, connection in self._members.items():
                local_links.send(connection, local_links.GO, rank)
        except LinkError as error:
            code = error.code or ErrorCode.RENDEZVOUS_FAILED
            for rank, connection in self._members.items():
                with suppress(LinkError):
                    local_links.send(connection, local_links.giving_up(code, str(error)), rank)
            # Those who have called and were not heard yet as well.
            with suppress(OSError):
                while self._accept(strangers):
                    pass
            while strangers:
                self._refuse(strangers.pop(), code, str(error))
            raise
        finally:
            self._listener.close()
            for connection in strangers:
                connection.close()

    def _accept(self, strangers: list[socket.socket]) -> bool:
        """Take in one who calls; return whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        connection.setblocking(False)
        try:
            local_links.check_user(connection, "the worker")
        except LinkError as error:
            self._refuse(connection, ErrorCode.TRANSPORT_UNAVAILABLE, str(error))
        else:
            strangers.append(connection)
        return True

    def _admit(self, connection: socket.socket) -> None:
        try:
            kind, fields, descriptors = local_links.receive(connection, None)
        except (LinkError, BlockingIOError):
            connection.close()
            return
        for descriptor in descriptors:
            os.close(descriptor)
        rank = local_links.read_hello(fields, self._key) if kind == local_links.HELLO else None
        if rank is None:
            self._refuse(connection, ErrorCode.RENDEZVOUS_FAILED, "this worker does not know this update's key")
        elif not 0 < rank < self._world_size:
            self._refuse(connection, ErrorCode.RENDEZVOUS_FAILED, f"there is no worker rank {rank}")
        elif rank in self._members:
            self._refuse(connection, ErrorCode.RENDEZVOUS_FAILED, f"worker rank {rank} joined twice")
        else:
            self._members[rank] = connection
            local_links.send(connection, local_links.MEMORY + self._memory.ticket, rank, self._memory.descriptor)

    def _refuse(self, connection: socket.socket, code: ErrorCode, text: str) -> None:
        with suppress(LinkError):
            local_links.send(connection, local_links.giving_up(code, text), -1)
        local_links.finish(connection)

    def _hear_join(self, rank: int, connection: socket.socket, joined: set[int]) -> None:
        try:
            kind, _, descriptors = local_links.receive(connection, rank)
        except BlockingIOError:
            return
        except LinkError as error:
            if error.code is not None:
                raise
            others = set(range(1, self._world_size)) - joined - {rank}
            raise self._nobody(others or {rank}, f"worker rank {rank} gave up", peer=rank) from error
        for descriptor in descriptors:
            os.close(descriptor)
        if kind != local_links.JOINED:
            raise LinkError(f"worker rank {rank} sent another message than was due", peer=rank)
        joined.add(rank)

    def _nobody(self, ranks: set[int], why: str, peer: int | None = None) -> LinkError:
        named = f"worker rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
        joint = " " if peer is None else ": "
        missing = sorted(ranks) if peer is None else [peer]
        return LinkError(f"{named} did not join{joint}{why}", missing=missing, peer=peer, timed_out=peer is None)

    # sending

    def lend(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """Return ``nbytes`` bytes of the shared memory to fill, see :class:`~.base.LendingSender`.

        Raises:
            ValueError: no buffer is that large.
            WeightPushError: ``transport_failed``; the transport cannot be used again.
        """
        with self._lending:
            self._require_open()
            if nbytes > self._memory.buffer_bytes:
                raise ValueError(f"a bucket of {nbytes} bytes does not fit buffers of {self._memory.buffer_bytes}")
            try:
                index = self._take(time.monotonic() + timeout_s)
            except (LinkError, Aborted) as error:
                self._fail("no buffer is free for the next bucket", error, f"{error} within {timeout_s:g} s")
            return self._memory.buffer(index, nbytes)

    def _take(self, deadline: float) -> int:
        """Wait until all workers are done with the next buffer, and reserve it."""
        index = self._next
        while True:
            with self._places:
                readers = self._readers[index]
                if readers is not None and not readers:
                    self._readers[index] = None
                    self._lent.append(index)
                    self._next = (index + 1) % self._memory.count
                    return index
            ranks = {connection: rank for rank, connection in self._members.items()}
            ready = self._waiter.ready(ranks, deadline)
            if not ready:
                raise self._late(index)
            for connection in ready:
                self._hear_done(ranks[connection], connection)

    def _late(self, index: int) -> LinkError:
        with self._places:
            rank = min(self._readers[index] or {_TRAINER})
            number = self._numbers.get(index)
        if rank == _TRAINER:
            return LinkError("the trainer did not send the bucket before", timed_out=True)
        return LinkError(f"worker rank {rank} did not take bucket {number}", peer=rank, timed_out=True)

    def _hear_done(self, rank: int, connection: socket.socket) -> None:
        try:
            kind, fields, descriptors = local_links.receive(connection, rank)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        number = local_links.read_done(fields) if kind == local_links.DONE else None
        with self._places:
            for index, held in self._numbers.items():
                readers = self._readers[index]
                if held == number and readers is not None and rank in readers:
                    readers.remove(rank)
                    return
        raise LinkError(f"worker rank {rank} gave back what it did not have", peer=rank)

    def send(self, number: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Show bucket ``number`` to all workers: where it lies if it was lent, else in a copy.

        A copy waits for a free buffer. Otherwise it returns at once, and :meth:`lend` waits.

        Raises:
            ValueError: ``buffer`` is not a contiguous 1-d uint8 tensor where the memory lies, or not the one that was
                lent first.
            WeightPushError: ``transport_failed``; the transport cannot be used again.
        """
        with self._busy:
            self._require_open()
            self._check_buffer(buffer, self._memory.tensor.device.type)
            nbytes = buffer.numel()
            what = f"bucket {number} ({nbytes} bytes) was not sent"
            try:
                if not self._lent:
                    with self._lending:
                        place = self._memory.buffer(self._take(time.monotonic() + timeout_s), nbytes)
                    buffer = place.copy_(buffer)
                self._post(number, buffer)
            except (LinkError, Aborted) as error:
                self._fail(what, error, f"not all workers took it within {timeout_s:g} s")

    def _post(self, number: int, buffer: torch.Tensor) -> None:
        index = self._memory.index_of(buffer)
        with self._places:
            if index is None or index != self._lent[0]:
                raise ValueError("buckets are sent in the order in which their buffers were lent")
            self._lent.popleft()
            self._readers[index] = set(self._members)
            self._numbers[index] = number
        message = local_links.bucket(number, index, buffer.numel())
        for rank, connection in self._members.items():
            local_links.send(connection, message, rank)

    def close(self) -> None:
        """Free the connections, not the memory. A pending call of another thread is aborted first."""
        self._acquire(self._lending)
        try:
            super().close()
        finally:
            self._lending.release()

    def _release(self) -> None:
        self._listener.close()
        for connection in self._members.values():
            local_links.finish(connection)
        self._members = {}
