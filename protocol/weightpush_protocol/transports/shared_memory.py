"""Memory that a trainer and the workers on its host see at the same time, and how they know that they share a host.

On the host it is an anonymous file (``memfd_create``): it has no name that could be left behind or guessed, and the
kernel frees it with the last process that has it open or mapped, however that one ends. Its size is sealed, so no
reader can be killed (SIGBUS) by a file that was cut short, and after the trainer has mapped it nobody else can map it
for writing. On a GPU it is what :mod:`.cuda_memory` makes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import stat
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

#: What ``/proc/PID/maps`` calls the memory, behind ``/memfd:``.
MEMORY_NAME: Final = "weightpush-buckets"
_MODE: Final = 0o600
#: Since Linux 5.1; Python has no name for it before 3.13.
_F_SEAL_FUTURE_WRITE: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class MemoryRefused(Exception):
    """A descriptor is not what a trainer's shared memory has to be; the message says why."""


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return 16 hex digits that are equal for processes that can share memory here, and for no others.

    They stand for one boot of one kernel, one network namespace and one user; '' where that cannot be told.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
    return hashlib.sha256(f"weightpush {boot} {namespace} {os.geteuid()}".encode()).hexdigest()[:16]


class ShownBuffers(ABC):
    """A trainer's memory that workers see: ``count`` buffers of ``buffer_bytes`` bytes, one behind the other.

    Attributes:
        tensor: all of it, as a 1-d uint8 tensor; the memory lives as long as any view of it.
        gpu: the GPU that it lies on (:func:`~.cuda_memory.gpu_id`), '' for the host's memory.
        descriptor: what a worker maps; None where it is the ticket.
        ticket: bytes by which a worker finds it.
    """

    gpu: str = ""
    descriptor: int | None = None
    ticket: bytes = b""

    def __init__(self, count: int, buffer_bytes: int, tensor: torch.Tensor) -> None:
        self.count = count
        self.buffer_bytes = buffer_bytes
        self.tensor = tensor

    @abstractmethod
    def close(self) -> None:
        """Give back what is not needed to read it; may be called twice."""

    def holds(self, count: int, nbytes: int, gpu: str = "") -> bool:
        """Whether it lies on ``gpu`` and has ``count`` buffers of ``nbytes`` bytes at least."""
        return self.gpu == gpu and self.count >= count and self.buffer_bytes >= nbytes

    def buffer(self, index: int, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` bytes of buffer ``index``."""
        start = index * self.buffer_bytes
        return self.tensor[start : start + nbytes]

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the buffer at whose start ``tensor`` lies; None for a tensor from elsewhere."""
        if tensor.untyped_storage().data_ptr() != self.tensor.untyped_storage().data_ptr():
            return None
        index, rest = divmod(int(tensor.storage_offset()), self.buffer_bytes)
        return index if rest == 0 else None


class SharedBuffers(ShownBuffers):
    """The trainer's memory on the host.

    Fresh pages cost more than filling them, so it is worth keeping for the next update. It is freed with the last
    tensor that shows it; :meth:`close` gives the descriptor back sooner.

    Args:
        count: how many buffers.
        nbytes: how many bytes each must hold; ``buffer_bytes`` is that, rounded up to whole pages.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        buffer_bytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        os.fchmod(self.descriptor, _MODE)
        os.ftruncate(self.descriptor, count * buffer_bytes)
        region = mmap.mmap(self.descriptor, count * buffer_bytes)
        # A child of the trainer's has no use for it and would keep it alive.
        region.madvise(mmap.MADV_DONTFORK)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with suppress(OSError):  # On an older kernel readers map it for reading only by their own choice.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        # Inference tensors could not be written outside the caller's inference_mode.
        with torch.inference_mode(False):
            super().__init__(count, buffer_bytes, torch.frombuffer(region, dtype=torch.uint8))

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        self._closing()


def map_for_reading(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a trainer's memory of ``nbytes`` bytes, as a 1-d uint8 tensor that must not be written to.

    A write into it ends the process (SIGSEGV). The mapping lives as long as the tensor and its views; ``descriptor``
    may be closed.

    Raises:
        MemoryRefused: it is not anonymous memory of this user alone, sealed, and of at least that size.
        OSError: the system refuses to map it.
    """
    _check(os.fstat(descriptor), nbytes)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise MemoryRefused("it is no anonymous memory") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise MemoryRefused("its size is not sealed, so it could be cut short while it is read")
    address = _libc_mmap()(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    region = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: other threads may still read.
    weakref.finalize(region, _libc_munmap(), address, nbytes).atexit = False
    with torch.inference_mode(False):
        return torch.frombuffer(region, dtype=torch.uint8)


def _check(found: os.stat_result, nbytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise MemoryRefused("it is no memory but something else")
    if found.st_uid != os.geteuid():
        raise MemoryRefused(f"it belongs to user {found.st_uid}, this process to user {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise MemoryRefused(f"others may open it (mode {stat.S_IMODE(found.st_mode):o}, expected {_MODE:o})")
    if found.st_size < nbytes:
        raise MemoryRefused(f"it has {found.st_size} bytes, the update needs {nbytes}")


# Python's own `mmap` object gives the address of a read-only mapping to nobody, and torch warns of its buffer.


@lru_cache(maxsize=1)
def _libc_mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_long),
    ]
    return function


@lru_cache(maxsize=1)
def _libc_munmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).munmap
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return function
