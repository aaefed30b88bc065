"""What the processes of a server hold, counted from outside."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import psutil

from faults.checks import Usage

_SETTLE_S: Final = 3.0


def processes(root: int) -> list[psutil.Process]:
    """Return the process ``root`` and all below it that live."""
    try:
        top = psutil.Process(root)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def role(process: psutil.Process) -> str:
    """Return ``api``, ``engine``, ``worker`` or ``other``, by the names that vLLM gives its processes."""
    with contextlib.suppress(psutil.Error, IndexError):
        title = process.cmdline()[0]
        for name, known in (("APIServer", "api"), ("EngineCore", "engine"), ("Worker", "worker")):
            if f"VLLM::{name}" in title:
                return known
    return "other"


def find(root: int, wanted: str) -> psutil.Process:
    """Return a process of ``role`` ``wanted``, or the one that does its work: one process can be all three.

    ``supervisor`` is ``root`` itself, ``keeper`` its child.
    """
    if wanted in ("supervisor", "keeper"):
        return processes(root)[("supervisor", "keeper").index(wanted)]
    roles = {role(process): process for process in processes(root)}
    if wanted == "worker":
        return roles.get("worker") or roles["engine"]
    if wanted == "api" and "api" not in roles:
        parent: psutil.Process = roles["engine"].parent()
        return parent
    return roles[wanted]


def usage(root: int) -> Usage:
    """Count once."""
    count = dict.fromkeys(("processes", "threads", "descriptors", "memfds", "files", "rss"), 0)
    for process in processes(root):
        with contextlib.suppress(psutil.Error, OSError):
            count["processes"] += 1
            count["threads"] += process.num_threads()
            count["rss"] += process.memory_info().rss
            for name in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{process.pid}/fd/{name}")
                    count["descriptors"] += 1
                    count["memfds"] += target.startswith("/memfd:")
    count["files"] = len(run_files(root))
    return Usage(**count)


def settled_usage(root: int) -> Usage:
    """Count until two looks agree, but for memory; for at most ``_SETTLE_S`` seconds."""
    deadline = time.monotonic() + _SETTLE_S
    last = usage(root)
    while time.monotonic() < deadline:
        time.sleep(0.15)
        now = usage(root)
        if (now.threads, now.descriptors, now.files) == (last.threads, last.descriptors, last.files):
            return now
        last = now
    return last


def run_files(root: int) -> list[Path]:
    """Return what lies in the run directories of the processes below ``root``."""
    found: list[Path] = []
    for process in processes(root):
        for directory in Path("/dev/shm").glob(f"weightpush-{os.getuid()}-{process.pid}-*"):
            found += directory.rglob("*")
    return found


def left_of(known: list[psutil.Process], deadline_s: float) -> list[psutil.Process]:
    """Wait until all of ``known`` are gone; return those that are still there after ``deadline_s``."""
    _, left = psutil.wait_procs(known, timeout=deadline_s)
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
