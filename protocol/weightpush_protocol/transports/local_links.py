"""Connections between a trainer and workers on one host: short messages, and what leads to the shared memory.

They are Unix sockets with abstract names, so nothing lies in a file system, and a connection breaks when the process at
its other end ends. Every message is one packet: a letter that says what it is, and its fields.

======= ============================== ====================================================================
letter  fields                         meaning
======= ============================== ====================================================================
``H``   rank, key                      worker: this is my rank, and I know the update's key
``M``   ticket (descriptor)            trainer: this is the memory; one of both, by where it lies
``J``                                  worker: I have mapped it
``G``                                  trainer: all have
``B``   number, buffer, bytes          trainer: this bucket lies there
``D``   number                         worker: I am done with that bucket
``E``   code, text                     either: I give up, and why
======= ============================== ====================================================================
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.transports import groups, sockets

HELLO: Final = b"H"
MEMORY: Final = b"M"
JOINED: Final = b"J"
GO: Final = b"G"
BUCKET: Final = b"B"
DONE: Final = b"D"
ERROR: Final = b"E"

_RANK: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<IIQ")
_NUMBER: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")
_MAX_BYTES: Final = 4096
_RETRY_S: Final = 0.01


class LinkError(Exception):
    """A connection, or what came over it, is of no use any more.

    Attributes:
        code: what it means for the update, where the other end said so.
        peer: rank of the process at the other end; None where it is not one process's fault.
        timed_out: the deadline passed.
        missing: ranks of the workers that have not joined.
    """

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        peer: int | None = None,
        timed_out: bool = False,
        missing: Iterable[int] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.peer = peer
        self.timed_out = timed_out
        self.missing = list(missing)


class Aborted(Exception):
    """Somebody aborted this end."""


class Waiter:
    """Waits for connections, until :meth:`wake` is called by any thread; from then on it never waits again."""

    def __init__(self) -> None:
        self._inner, self._outer = socket.socketpair()

    def wake(self) -> None:
        """End a wait that runs, and all later ones."""
        sockets.cut(self._outer)

    def close(self) -> None:
        """Free its descriptors."""
        self._inner.close()
        self._outer.close()

    def ready(self, connections: Iterable[socket.socket], deadline: float) -> list[socket.socket]:
        """Return those from which something can be read; none where ``deadline`` (``time.monotonic()``) passed.

        Raises:
            Aborted: it was woken.
        """
        by_number = {connection.fileno(): connection for connection in connections}
        poller = select.poll()
        for number in (*by_number, self._inner.fileno()):
            if number < 0:
                raise Aborted
            poller.register(number, select.POLLIN)
        found = {number for number, _ in poller.poll(1000 * max(0.0, deadline - time.monotonic()))}
        if self._inner.fileno() in found:
            raise Aborted
        return [by_number[number] for number in found]


def listen(name: str) -> socket.socket:
    """Listen under an abstract name. Raises ``OSError``."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(name: str, waiter: Waiter, deadline: float) -> socket.socket:
    """Connect to who listens under an abstract name.

    Raises:
        LinkError: ``transport_unavailable``: nobody does here, or somebody of another user; or it took too long.
        Aborted: ``waiter`` was woken.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        while True:
            try:
                connection.connect(f"\0{name}")
                break
            except BlockingIOError:  # So many come at once that it cannot take them all yet.
                waiter.ready((), min(deadline, time.monotonic() + _RETRY_S))
                if time.monotonic() >= deadline:
                    raise LinkError("the trainer does not take the connection", timed_out=True) from None
        check_user(connection, "the trainer")
    except OSError as error:
        connection.close()
        raise LinkError(
            f"no trainer listens at @{name} ({error.strerror}): it has ended, or is on another host or in another "
            "network namespace; use 'gloo' or 'http'",
            code=ErrorCode.TRANSPORT_UNAVAILABLE,
        ) from error
    except (LinkError, Aborted):
        connection.close()
        raise
    return connection


def check_user(connection: socket.socket, who: str) -> None:
    """Raise ``LinkError`` (``transport_unavailable``) where the other end's process is of another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise LinkError(
            f"{who} runs as user {user}, this process as {os.geteuid()}: shared memory needs one user on both sides; "
            "use 'gloo' or 'http'",
            code=ErrorCode.TRANSPORT_UNAVAILABLE,
        )


def send(connection: socket.socket, message: bytes, peer: int, descriptor: int | None = None) -> None:
    """Send one message. Never waits: what may be under way at the same time always fits.

    Raises:
        LinkError: the connection to ``peer`` is closed.
    """
    try:
        if descriptor is None:
            connection.send(message)
        else:
            socket.send_fds(connection, [message], [descriptor])
    except OSError as error:
        # Why it closed the connection may have come before.
        with suppress(LinkError, BlockingIOError):
            receive(connection, peer)
        raise LinkError(f"{error.strerror} ({groups.rank_text(peer)})", peer=peer) from error


def receive(connection: socket.socket, peer: int | None) -> tuple[bytes, bytes, list[int]]:
    """Read the next message: its letter, its fields, and descriptors that came with it, which are the caller's.

    Raises:
        BlockingIOError: there is none.
        LinkError: ``peer`` closed the connection, or gave up.
    """
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            break
        except ConnectionResetError:
            # It was closed with unread messages; what it had sent before can still be read.
            continue
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkError(f"{error.strerror} ({groups.rank_text(peer)})", peer=peer) from error
    kind, fields = data[:1], data[1:]
    if not data or kind == ERROR:
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == ERROR:
            raise _told(fields, peer)
        raise LinkError(f"connection closed by peer ({groups.rank_text(peer)})", peer=peer)
    return kind, fields, descriptors


def finish(connection: socket.socket) -> None:
    """Close a connection so that the other end can still read what was sent before."""
    sockets.cut(connection)
    # Closed with unread messages, it would be reset.
    with suppress(OSError):
        while connection.recv(_MAX_BYTES, socket.MSG_DONTWAIT):
            pass
    connection.close()


def hello(rank: int, key: str) -> bytes:
    """Return the message of worker ``rank``, which knows ``key``."""
    return HELLO + _RANK.pack(rank) + key.encode("ascii")


def read_hello(fields: bytes, key: str) -> int | None:
    """Return the rank of whoever says hello; None where it does not know ``key``."""
    if len(fields) < _RANK.size or not hmac.compare_digest(fields[_RANK.size :], key.encode("ascii")):
        return None
    rank: int = _RANK.unpack_from(fields)[0]
    return rank


def bucket(number: int, index: int, nbytes: int) -> bytes:
    """Return the message that bucket ``number`` of ``nbytes`` bytes lies in buffer ``index``."""
    return BUCKET + _PLACE.pack(number, index, nbytes)


def read_bucket(fields: bytes) -> tuple[int, int, int]:
    """Return number, buffer and size in bytes. Raises ``LinkError`` where that is none."""
    number, index, nbytes = _unpack(_PLACE, fields)
    return number, index, nbytes


def done(number: int) -> bytes:
    """Return the message that a worker is done with bucket ``number``."""
    return DONE + _NUMBER.pack(number)


def read_done(fields: bytes) -> int:
    """Return the number of the bucket. Raises ``LinkError`` where that is none."""
    return _unpack(_NUMBER, fields)[0]


def giving_up(code: ErrorCode, text: str) -> bytes:
    """Return the message that the sender of it gives up."""
    return (ERROR + code.value.encode() + b"\0" + text.encode())[:_MAX_BYTES]


def _unpack(layout: struct.Struct, fields: bytes) -> tuple[int, ...]:
    try:
        return layout.unpack(fields)
    except struct.error:
        raise LinkError("the other end sent a message of another form") from None


def _told(fields: bytes, peer: int | None) -> LinkError:
    code, _, text = fields.partition(b"\0")
    try:
        known = ErrorCode(code.decode("ascii", "replace"))
    except ValueError:
        known = None
    return LinkError(text.decode("utf-8", "replace"), code=known, peer=peer)
