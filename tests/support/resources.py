"""What the processes of a server hold, counted from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from support.server import ServerProcess


def resources(server: ServerProcess) -> dict[str, int]:
    """Count processes, threads and descriptors of ``server``, and the host copies that it holds, with their bytes."""
    found = {"processes": 0, "threads": 0, "descriptors": 0}
    for pid in server.processes():
        with contextlib.suppress(OSError):  # It may end meanwhile.
            folder = Path(f"/proc/{pid}")
            found["threads"] += len(list((folder / "task").iterdir()))
            found["descriptors"] += len(list((folder / "fd").iterdir()))
            found["processes"] += 1
    sizes = copy_sizes(server)
    return {**found, "copies": len(sizes), "copy_bytes": sum(sizes)}


def copy_sizes(server: ServerProcess) -> list[int]:
    """Return the bytes of memory behind each host copy, whatever the number of processes that have it open."""
    sizes: dict[int, int] = {}
    for pid in server.processes():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith("/memfd:weightpush"):
                    status = descriptor.stat()
                    sizes[status.st_ino] = status.st_blocks * 512
    return list(sizes.values())
