"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

_MEMINFO: Final = Path("/proc/meminfo")
#: Limit, use, and statistics of the control group that a container's process is in: files and the name of the page
#: cache that can be dropped, of the present hierarchy and of the former.
_CGROUPS: Final = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be taken on ``device``; on the host, within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _number(_MEMINFO, "MemAvailable:") * 1024
    for root, limit, used, droppable in _CGROUPS:
        try:
            allowed = (root / limit).read_text().strip()
            taken = int((root / used).read_text()) - _number(root / "memory.stat", droppable)
        except OSError:
            continue
        if allowed != "max":
            free = min(free, int(allowed) - taken)
    return free


def _number(file: Path, key: str) -> int:
    """Return the number behind ``key`` in a file of ``key number`` lines."""
    for line in file.read_text().splitlines():
        words = line.split()
        if words[:1] == [key]:
            return int(words[1])
    return 0
