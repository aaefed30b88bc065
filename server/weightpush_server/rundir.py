"""A server's private directory in memory: shared record, spooled bodies, sockets. Standard library only."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Where a server finds the directory that was made for it.
VARIABLE: Final = "WEIGHTPUSH_RUN_DIRECTORY"
_SHARED_MEMORY: Final = Path("/dev/shm")
#: Names that vLLM gives to memory shared between its CPU workers, and never takes away.
_SEGMENT: Final = re.compile(r"vllm_dist_[0-9a-f]{8,64}")
_STATE: Final = "state"
_SPOOL: Final = "spool"
_UP: Final = "up"
_SEGMENTS: Final = "segments"
#: How it is opened for its lock, which programs that the opener executes do not inherit.
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunDirectory:
    """Made by the supervisor and used by the processes of one server.

    ``lock``: the directory's file descriptor, shared lock held, of the process that made it. Its forks inherit it, what
    they execute does not: the lock lasts for as long as the supervisor or its keeper lives. Process ids would not tell:
    containers may share memory and not see each other's processes.
    """

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> RunDirectory:
        """Make a directory that belongs to this process, and remove those of processes that were killed."""
        base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        prefix = f"weightpush-{os.getuid()}-"
        for left in base.glob(f"{prefix}*"):
            cls(left)._remove_if_left()
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
            with suppress(FileNotFoundError):  # Swept away before it had its lock.
                lock = os.open(path, _DIRECTORY)
                # Shared is enough against those who sweep, and all that a directory's descriptor gets on NFS. There
                # nobody gets the exclusive one, and nothing is swept.
                fcntl.flock(lock, fcntl.LOCK_SH)
                if path.exists():
                    break
                os.close(lock)
        made = cls(path, lock)
        made.spool.mkdir(mode=0o700)
        (made.path / _SEGMENTS).mkdir(mode=0o700)
        return made

    def _remove_if_left(self) -> None:
        """Remove it if it is a directory of this user that nobody holds."""
        try:
            directory = os.open(self.path, _DIRECTORY)
        except OSError:
            return
        try:
            if os.fstat(directory).st_uid == os.getuid():
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.remove()
        except OSError:
            return  # Its owner lives.
        finally:
            os.close(directory)

    @property
    def state_file(self) -> Path:
        """The file of the shared record; it exists once the server's arguments have been accepted."""
        return self.path / _STATE

    @property
    def spool(self) -> Path:
        """Directory of request bodies."""
        return self.path / _SPOOL

    def note_up(self) -> None:
        """Note that the server has come up."""
        (self.path / _UP).touch()

    def up_since(self) -> float | None:
        """Return when the server came up (``time.time``), or ``None`` if it never did."""
        try:
            return (self.path / _UP).stat().st_mtime
        except FileNotFoundError:
            return None

    def note_segments(self, name: str) -> None:
        """Note the beginning of names of shared memory that nobody else will remove; other names are ignored."""
        if _SEGMENT.fullmatch(name):
            (self.path / _SEGMENTS / name).touch()

    def remove(self) -> None:
        """Remove it, and the shared memory that was noted in it. For when the server's processes are gone."""
        with suppress(OSError):
            for noted in (self.path / _SEGMENTS).iterdir():
                if _SEGMENT.fullmatch(noted.name):
                    for left in (*_SHARED_MEMORY.glob(f"{noted.name}*"), Path(tempfile.gettempdir(), noted.name)):
                        left.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
