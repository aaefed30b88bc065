"""The bytes under a tensor, for libraries that take buffers.

torch has no buffer protocol of its own, and numpy, by which it offers one, need not be there: torch can do without.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

_READ_ONLY: Final = 0x100  # PyBUF_READ
_view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def bytes_under(raw: torch.Tensor) -> memoryview:
    """Return the memory under a contiguous 1-d uint8 tensor on the CPU, to be read.

    The view keeps nothing alive: the caller holds the tensor for as long as it is used.
    """
    if raw.dtype is not torch.uint8 or raw.dim() != 1 or not raw.is_contiguous() or raw.device.type != "cpu":
        raise ValueError(f"a contiguous 1-d uint8 tensor on the CPU is wanted, got {raw.dtype} {list(raw.shape)}")
    if not raw.numel():
        return memoryview(b"")
    view: memoryview = _view(raw.data_ptr(), raw.numel(), _READ_ONLY)
    return view
