"""Addresses and sockets below the collective transports: find, bind, connect, and cut connections from outside."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from weightpush_protocol.errors import ErrorCode, WeightPushError

#: Address and port.
Endpoint = tuple[str, int]

_PROBE_SLICE_S: Final = 0.25
_LOOPBACK_NAME: Final = "localhost"


def plain_host(host: str) -> str:
    """Return ``host`` without the brackets that URLs put around an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def pick_host(server_host: str) -> str:
    """Return the address under which this machine is seen from ``server_host`` (name or address, not a URL).

    It is the local address of the route there, so a loopback address stays one; nothing is sent.

    Raises:
        WeightPushError: ``rendezvous_failed``: the name does not resolve or there is no route.
    """
    host = plain_host(server_host)
    problem: OSError | None = None
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        candidates, problem = [], error
    for family, kind, proto, _, address in candidates:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise WeightPushError(
        ErrorCode.RENDEZVOUS_FAILED,
        f"no route to {host!r}: {problem}; give the trainer's own address instead",
        details={"host": host, "exception": type(problem).__name__},
    )


def is_address(host: str) -> bool:
    """Return whether ``host`` is a numeric IPv4 or IPv6 address."""
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


def listen(host: str) -> socket.socket:
    """Listen on a free TCP port where peers that connect to ``host`` will arrive.

    A numeric address and ``localhost`` are bound as such. Any other name listens on all addresses, since a machine's
    own name often resolves to a loopback address on itself only.

    Raises:
        OSError: ``host`` is not an address of this machine.
    """
    if host == _LOOPBACK_NAME or is_address(host):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        targets = [(family, address)]
    else:
        targets = [(socket.AF_INET6, ("::", 0)), (socket.AF_INET, ("0.0.0.0", 0))]
    problem: OSError | None = None
    for family, address in targets:
        server: socket.socket | None = None
        try:
            server = socket.socket(family, socket.SOCK_STREAM)
            if family == socket.AF_INET6 and len(targets) > 1:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(address)
            server.listen(1024)
        except OSError as error:
            problem = error
            if server is not None:
                server.close()
        else:
            return server
    raise problem or OSError(f"cannot listen on {host!r}")


def connect(host: str, port: int, deadline: float, cancelled: Callable[[], bool]) -> socket.socket:
    """Connect and return the socket, in blocking mode.

    Raises:
        OSError: refused, unreachable, unresolvable, or not answered before ``deadline`` (``time.monotonic()``).
        InterruptedError: ``cancelled`` said so.
    """
    problem: OSError | None = None
    for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        client = socket.socket(family, kind, proto)
        try:
            client.setblocking(False)
            _finish_connect(client, client.connect_ex(address), deadline, cancelled)
            client.setblocking(True)
            return client
        except InterruptedError:
            client.close()
            raise
        except OSError as error:
            client.close()
            problem = error
    raise problem or OSError(f"{host!r} has no address")


def _finish_connect(client: socket.socket, number: int, deadline: float, cancelled: Callable[[], bool]) -> None:
    while number in (errno.EINPROGRESS, errno.EALREADY):
        if cancelled():
            raise InterruptedError("aborted")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        poller = select.poll()
        poller.register(client, select.POLLOUT)
        if poller.poll(1000 * min(left, _PROBE_SLICE_S)):
            number = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            break
    if number:
        raise OSError(number, os.strerror(number))


def own_connections() -> Iterator[socket.socket]:
    """Yield a duplicate of every connected TCP socket of this process; the caller closes it.

    Yields nothing where ``/proc`` does not list descriptors.
    """
    # All descriptors are read before the first is duplicated, or a duplicate could be met again.
    for number in _own_sockets():
        try:
            # The duplicate cannot be closed and reused behind our back, so what is checked on it stays true.
            duplicate = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
            try:
                duplicate.getpeername()
            except OSError:
                pass
            else:
                yield duplicate
                continue
        duplicate.close()


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Whether the other end has closed or reset a TCP connection; reads nothing from it and never waits."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _own_sockets() -> list[int]:
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
    return found


def cut(connection: socket.socket) -> None:
    """End a connection in both directions, which ends every pending operation on it with an error."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def wire_address(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return the part of the kernel's ``sockaddr`` that tells one listening socket from another."""
    host, port = address[0], address[1]
    if ":" in host:
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + packed
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_pton(socket.AF_INET, host)
