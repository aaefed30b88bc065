"""A checkpoint directory on the server's own disk: found, opened and checked before anything is written.

Paths come from outside. Whatever is opened lies below one of the allowed roots, links followed, and is looked at again
through its descriptor, so that a link that is switched meanwhile leads nowhere else. Descriptors stay open until the
end: files that are replaced by others meanwhile stay readable, and files that are overwritten in place are noticed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from weightpush_protocol.checkpoint_files import CheckpointFilesError, choose_files
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports.http import LENGTH_BYTES, header_bytes, parse_header
from weightpush_server.stored import StoredCheckpoint, StoredFile, StoredLayout, StoredTensor

_INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAX_INDEX_BYTES: Final = 64 * 2**20
#: The kernel's clock for files moves in ticks: a file that was written within the last of them may be written again
#: without looking any newer. Files must have been left alone for this long, in nanoseconds.
_QUIET_NS: Final = 100_000_000


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from another one, and from itself after a write: sizes in bytes, times in nanoseconds."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        """Read it off a ``stat``. The time of change is the kernel's own; nobody can put it back."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class _OpenFile:
    name: str
    descriptor: int
    identity: FileIdentity


def resolve_directory(path: str, roots: Sequence[Path]) -> Path:
    """Return the directory that ``path`` leads to, below one of ``roots``, which are resolved already.

    Raises:
        WeightPushError: ``disk_reload_off`` without roots; ``path_refused``, with the same words for a path outside the
            roots whether it exists or not.
    """
    if not roots:
        raise WeightPushError(
            ErrorCode.DISK_RELOAD_OFF,
            "this server loads nothing from disk: start it with --reload-root DIR, or push the checkpoint",
        )
    shown = _shown(path)
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        _refuse(f"the path {shown} holds control characters")
    if not path.startswith("/"):
        _refuse(
            f"the path {shown} is not absolute: give a directory on the server's own disk (URLs and names of a hub are "
            "not fetched)"
        )
    if ".." in path.split("/"):
        _refuse(f"the path {shown} goes up with '..'; write it without")
    try:
        resolved = Path(os.path.realpath(path))
    except (OSError, ValueError):
        _refuse(f"the path {shown} cannot be followed")
    if not _is_below(resolved, roots):
        _refuse(f"the path {shown} does not lead below a --reload-root of this server ({_listed(roots)})")
    if not os.path.isdir(resolved):  # False as well for a name that is too long.
        _refuse(f"the path {shown} is no directory on the server")
    return resolved


class DiskCheckpoint:
    """The files of one checkpoint, held open; every header is read and checked. ``close`` it; safe to call twice.

    Attributes:
        stored: the tensors in the order of the files and of their bytes, for the workers to read.

    Raises:
        WeightPushError: ``path_refused``: a file leads out of the roots or is no file; ``checkpoint_damaged``, naming
            file and tensor: missing, truncated or overlong shards, damaged headers, dtypes that cannot travel, names
            that two files hold, an index that does not fit; ``files_changed``: somebody is writing there just now.
    """

    def __init__(self, directory: Path, roots: Sequence[Path]) -> None:
        self.directory = directory
        self._roots = roots
        self._files: list[_OpenFile] = []
        try:
            self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            _refuse(f"{directory} cannot be opened: {error.strerror}")
        try:
            self._names = self._list()
            self.stored = self._read()
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    def _list(self) -> frozenset[str]:
        """Return the names that can belong to a checkpoint."""
        return frozenset(name for name in os.listdir(self._folder) if name.endswith((".safetensors", _INDEX_SUFFIX)))

    def _read(self) -> StoredCheckpoint:
        # An index that cannot be read must not make a checkpoint without one.
        present = {name for name in self._names if name.endswith(_INDEX_SUFFIX) or self._is_file(name)}
        try:
            chosen = choose_files(present, self._read_index)
            shards = [self._open(name) for name in chosen.files]
            self._let_settle()
            tensors: list[StoredTensor] = []
            for number, shard in enumerate(shards):
                tensors += _read_header(shard, number)
            chosen.check((shards[tensor.file].name, tensor.spec.name) for tensor in tensors)
        except CheckpointFilesError as error:
            raise WeightPushError(
                ErrorCode.CHECKPOINT_DAMAGED, f"{self.directory}: {error}", details={"path": str(self.directory)}
            ) from error
        if not tensors:
            raise _damaged(shards[0].name, f"of {self.directory} holds no tensor")
        files = tuple(StoredFile(path=f"/proc/{os.getpid()}/fd/{shard.descriptor}") for shard in shards)
        return StoredCheckpoint(files, StoredLayout(tuple(tensors)))

    def _is_file(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._folder).st_mode)
        except OSError:
            return False

    def _read_index(self, name: str) -> bytes:
        index = self._open(name)
        if index.identity.nbytes > _MAX_INDEX_BYTES:
            raise CheckpointFilesError(
                f"the index {name} has {index.identity.nbytes} bytes, allowed are {_MAX_INDEX_BYTES}"
            )
        return _read_range(index, 0, index.identity.nbytes)

    def _open(self, name: str) -> _OpenFile:
        """Open a file of the directory, if it lies below a root with all links followed."""
        where = os.path.realpath(self.directory / name)
        if not _is_below(Path(where), self._roots):
            _refuse(f"{name!r} in {self.directory} leads out of the --reload-root directories")
        try:
            # Without blocking: it might have become a pipe by now.
            descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise _damaged(name, f"of {self.directory} cannot be opened: {error.strerror}") from error
        opened = os.fstat(descriptor)
        self._files.append(_OpenFile(name, descriptor, FileIdentity.of(opened)))
        if not stat.S_ISREG(opened.st_mode):
            _refuse(f"{name!r} in {self.directory} is not a regular file")
        # A folder on the way may have been exchanged for a link between the two looks.
        if not _is_below(Path(os.readlink(f"/proc/self/fd/{descriptor}")), self._roots):
            _refuse(f"{name!r} in {self.directory} leads out of the --reload-root directories")
        return self._files[-1]

    def _let_settle(self) -> None:
        """Wait until any later write to one of the files must show in its times."""
        newest = max(max(file.identity.modified_ns, file.identity.changed_ns) for file in self._files)
        age = time.time_ns() - newest
        if 0 <= age < _QUIET_NS:  # Beyond that, or with another machine's clock, waiting would help nothing.
            time.sleep((_QUIET_NS - age) / 1e9)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Look whether the files are still those that were opened, under their names, and unwritten since.

        Raises:
            WeightPushError: ``files_changed``, naming the file.
        """
        for file in self._files:
            if FileIdentity.of(os.fstat(file.descriptor)) != file.identity:
                raise self._changed(f"{file.name} was written to")
            now: FileIdentity | None = None
            with suppress(OSError):
                now = FileIdentity.of(os.stat(self.directory / file.name))
            if now != file.identity:
                raise self._changed(f"{file.name} was {'removed' if now is None else 'replaced'}")
        if self._list() != self._names:
            names = sorted(self._list() ^ self._names)
            raise self._changed(f"{', '.join(names[:5])} came or went")

    def _changed(self, what: str) -> WeightPushError:
        return WeightPushError(
            ErrorCode.FILES_CHANGED,
            f"{self.directory}: {what} while the checkpoint was loaded: load it again when it is complete. To be safe, "
            "write a checkpoint into a new directory, and give that one's name, or a link to it, when it is done",
            details={"path": str(self.directory)},
        )

    def close(self) -> None:
        """Let go of all files."""
        descriptors = [self._folder, *(file.descriptor for file in self._files)]
        self._folder, self._files = -1, []
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def _read_header(file: _OpenFile, number: int) -> list[StoredTensor]:
    """Return the tensors of file ``number``, from its header; the size of the file must be what the header says."""
    start = _read_range(file, 0, LENGTH_BYTES)
    if LENGTH_BYTES + int.from_bytes(start, "little") > file.identity.nbytes or len(start) < LENGTH_BYTES:
        # Not the number itself: it is part of a file that may be no checkpoint at all.
        raise _damaged(file.name, "is truncated or no safetensors file: its header ends beyond its end")
    try:
        start += _read_range(file, len(start), header_bytes(start) - len(start))
        header = parse_header(start, total_bytes=file.identity.nbytes)
    except WeightPushError as error:
        what = error.message.partition(": ")[2] or error.message
        raise _damaged(file.name, f"is damaged: {what}", **error.details) from error
    return [StoredTensor(spec=spec, file=number, offset=header.data_start + at) for spec, at in header.entries]


def _read_range(file: _OpenFile, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes; fewer where the file ends before."""
    parts = bytearray()
    while len(parts) < length:
        try:
            part = os.pread(file.descriptor, length - len(parts), offset + len(parts))
        except OSError as error:
            raise _damaged(file.name, f"cannot be read: {error.strerror}") from error
        if not part:
            break
        parts += part
    return bytes(parts)


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _refuse(message: str) -> NoReturn:
    raise WeightPushError(ErrorCode.PATH_REFUSED, message)


def _damaged(file: str, what: str, **details: object) -> WeightPushError:
    return WeightPushError(ErrorCode.CHECKPOINT_DAMAGED, f"{file} {what}", details={"file": file, **details})


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))


def _shown(path: str) -> str:
    return ascii(path if len(path) <= 200 else f"{path[:200]}...")
