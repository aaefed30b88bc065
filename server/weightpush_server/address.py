"""The address of a server belongs to it alone: nobody else serves there, from its start to its end."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from pathlib import Path

from weightpush_server.options import StartRefusedError


def claim_address(host: str | None, port: int, uds: str | None = None) -> socket.socket | None:
    """Take the address for this process; keep the result open for as long as it serves (``None`` for ``--port 0``).

    With several API processes vLLM shares its port among them (``SO_REUSEPORT``), and the kernel would let a second
    server of this user in: ``begin`` would reach one of them and the first bucket the other. A socket of the file
    system that a server left behind when it was killed is removed.

    Raises:
        StartRefusedError: somebody else serves there, or is about to.
    """
    if uds:
        where = f"unix:{os.path.realpath(uds)}"
    elif port:
        where = f"{host or ''}:{port}"
    else:
        return None
    held = socket.socket(socket.AF_UNIX)
    try:
        # An abstract name: it is unique where ports are, in one network namespace, and ends with its process.
        _bind(held, f"\0weightpush-{os.getuid()}-{hashlib.sha256(where.encode()).hexdigest()[:32]}", where)
        if uds:
            _remove_left_socket(Path(uds), where)
        else:
            with socket.socket(socket.AF_INET6 if ":" in (host or "") else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _bind(probe, (host or "", port), where)
    except StartRefusedError:
        held.close()
        raise
    return held


def _bind(sock: socket.socket, address: str | tuple[str, int], where: str) -> None:
    try:
        sock.bind(address)
    except OSError as error:
        # Whatever else is wrong with an address vLLM says itself.
        if error.errno == errno.EADDRINUSE:
            raise _taken(where) from None


def _remove_left_socket(path: Path, where: str) -> None:
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return
        else:
            raise _taken(where)


def _taken(where: str) -> StartRefusedError:
    return StartRefusedError(
        f"{where}: Address already in use: another server is there, or about to be. Stop it, or give this one another "
        "address (--port, --uds)"
    )
