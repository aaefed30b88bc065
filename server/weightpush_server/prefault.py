"""Mapping the pages of a file in memory before they are read: one by one that takes as long as copying them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch

#: Linux 5.14 has it; older kernels know no such advice.
_MADV_POPULATE_READ: Final = 22
#: Bytes that are asked for at once: the kernel holds what other threads need for new memory meanwhile, half a
#: millisecond.
_STEP: Final = 4 * 2**20


def prefault(memory: torch.Tensor, wanted: Callable[[], bool]) -> bool:
    """Have all pages of a mapping (a 1-d uint8 tensor that begins with it) mapped, while they are ``wanted``.

    Other threads run meanwhile. Return whether it was done; where it was not, a page is mapped when it is read.
    """
    try:
        # Through `CDLL`, which lets go of the interpreter for the length of the call.
        advise: Any = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # Another C library; then pages are mapped when they are read.
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, memory.numel(), _STEP):
        length = min(_STEP, memory.numel() - start)
        if not wanted() or advise(memory.data_ptr() + start, length, _MADV_POPULATE_READ):
            return False
    return True
