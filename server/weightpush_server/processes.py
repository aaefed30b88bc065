"""Linux processes as a supervisor sees them: children and orphans, and ending all of them. Standard library only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02
#: What unlinks the shared memory and semaphores of dead processes; it ends by itself once all of them are gone.
_TRACKER: Final = b"multiprocessing.resource_tracker"
_TRACKER_S: Final = 5.0
#: Seconds that a line waits for somebody to read what was printed before.
_SAY_S: Final = 1.0


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, so that none can get away.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wake_when_parent_dies() -> None:
    """Go on, should this process be stopped when its parent dies.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def stand_in_for_closed() -> None:
    """Open ``/dev/null`` where standard input, output or error is closed, for this process and what it starts.

    Else the next file to be opened gets that number, and whoever prints writes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # The lowest free number, which is this one.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def children_of(pid: int) -> list[int]:
    """Return the direct children of ``pid``, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if _stat(int(entry.name))[1] == str(pid).encode():
                    found.append(int(entry.name))
    return found


def session_of(pid: int) -> int | None:
    """Return the session of a process, also of a zombie; ``None`` if there is no such process."""
    try:
        return int(_stat(pid)[3])
    except OSError:
        return None


def _stat(pid: int) -> list[bytes]:
    """Return state, parent, group, session, ... of a process. Raises ``OSError`` if there is none."""
    # "pid (name) state ...": the name may hold spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def has_in_environment(pid: int, entry: str) -> bool:
    """Whether a process was started with ``entry``, NAME=VALUE, in its environment."""
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def reap() -> dict[int, int]:
    """Collect all children that have ended: exit status by process id, as `exit_status` says it."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
            ended[found[0]] = exit_status(found[1])
    return ended


def exit_status(wait_status: int) -> int:
    """Return what a shell would show: the exit code, or 128 and the signal that killed the process."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def describe_exit(status: int) -> str:
    """Say in words how a process ended."""
    if status > 128:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(status - 128).name}"
    return f"exited with {status}"


def end_all_children(
    *, patience_s: float, limit_s: float = 30.0, is_ours: Callable[[int], bool] = lambda _: True
) -> bool:
    """End everything below this process, which must have called `adopt_orphans`, as far as ``is_ours`` says so.

    First all get ``patience_s`` seconds to end by themselves, then they are killed. Children of what is killed become
    children of this process, so that the loop gets hold of them whatever session or group they are in.

    Returns:
        Whether nothing is left; False if a process could not even be killed within ``limit_s`` seconds.
    """
    started = time.monotonic()
    only_trackers: float | None = None
    while True:
        reap()
        left = [pid for pid in children_of(os.getpid()) if is_ours(pid)]
        now = time.monotonic()
        if not left:
            return True
        if now - started > patience_s + limit_s:
            return False
        if now - started >= patience_s:
            others = [pid for pid in left if not _is_tracker(pid)]
            only_trackers = None if others else only_trackers or now
            late = only_trackers is not None and now - only_trackers > _TRACKER_S
            for pid in left if late else others:
                # Nobody else collects our children, so the id still means the same process.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def say(message: str) -> None:
    """Print one line on standard error, even if nobody reads it any more.

    Where nobody has read what was printed before, a pipe is full: the line is dropped, as nothing may wait for it.
    """
    with suppress(OSError, ValueError):
        if _takes_a_line():
            print(f"weightpush serve: {message}", file=sys.stderr, flush=True)


def _takes_a_line() -> bool:
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):
        return True  # No file, but something that a program has put in its place.
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    return bool(room.poll(1000 * _SAY_S))
