"""GPU memory that a trainer and workers on the same GPU see at the same time, by CUDA's interprocess handles.

A handle is 64 plain bytes (``cudaIpcMemHandle_t``), which mean something on this host only, and while the process that
made the memory lives. The driver frees the memory with that process, and a mapping with the process that has it. The
allocation is a multiple of 2 MiB, so that a handle shows nothing else of the trainer's (CUDA's programming guide,
"Interprocess Communication").
"""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from weightpush_protocol.transports.shared_memory import MemoryRefused, ShownBuffers

#: Bytes of a handle.
HANDLE_BYTES: Final = 64
_GRANULE: Final = 2 * 2**20
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def gpu_id(device: torch.device) -> str:
    """Return what names the GPU of ``device`` on this host, whatever number it has in a process; '' for a CPU."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


class CudaBuffers(ShownBuffers):
    """The trainer's memory on its GPU: ``count`` buffers of ``buffer_bytes`` bytes, one behind the other.

    Args:
        count: how many buffers.
        nbytes: how many bytes each must hold.
        device: the GPU.

    Raises:
        OSError: CUDA gives no such memory, or its runtime library cannot be called.
    """

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        buffer_bytes = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        self.gpu = gpu_id(device)
        pointer, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(count * buffer_bytes))
            memory = _Memory(pointer, count * buffer_bytes, "cudaFree")
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
            super().__init__(count, buffer_bytes, memory.tensor(device))
        self.ticket = bytes(handle.reserved)

    def close(self) -> None:
        """Has nothing to give back: the memory goes with the last tensor that shows it."""


def map_gpu_memory(ticket: bytes, gpu: str, nbytes: int) -> torch.Tensor:
    """Map a trainer's memory of ``nbytes`` bytes on the GPU ``gpu``, as a 1-d uint8 tensor that must not be written to.

    The mapping lives as long as the tensor and its views.

    Raises:
        MemoryRefused: this process does not see that GPU, or ``ticket`` is no handle.
        OSError: CUDA refuses to map it.
    """
    if len(ticket) != HANDLE_BYTES:
        raise MemoryRefused(f"a handle has {HANDLE_BYTES} bytes, this one {len(ticket)}")
    there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    device = next((device for device in there if gpu_id(device) == gpu), None)
    if device is None:
        raise MemoryRefused(f"it lies on GPU {gpu}, which this process does not see")
    handle, pointer = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*ticket)), ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _Memory(pointer, nbytes, "cudaIpcCloseMemHandle").tensor(device)


class _Memory:
    """Memory at an address; ``release`` is the call that ends it, once no tensor shows it any more."""

    def __init__(self, pointer: ctypes.c_void_p, nbytes: int, release: str) -> None:
        # By this protocol torch takes memory that is not its own; the tensor keeps this object.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "strides": None,
            "version": 3,
        }
        # Not at exit: the driver does it, and other threads may still read.
        weakref.finalize(self, _runtime()[release], pointer).atexit = False

    def tensor(self, device: torch.device) -> torch.Tensor:
        # Inference tensors could not be written outside the caller's inference_mode.
        with torch.inference_mode(False):
            return torch.as_tensor(self, device=device)


def _call(name: str, *arguments: Any) -> None:
    status = _runtime()[name](*arguments)
    if status:
        text = _runtime()["cudaGetErrorString"](status)
        # What CUDA remembers of it must not turn up in somebody else's check.
        _runtime()["cudaGetLastError"]()
        raise OSError(status, f"{name}: {text.decode(errors='replace')}")


@lru_cache(maxsize=1)
def _runtime() -> dict[str, Any]:
    """Return the functions of the CUDA runtime that torch has loaded. Raises ``OSError`` where there is none."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = sorted({line.split()[-1] for line in lines if "/libcudart" in line})
    if not loaded:
        raise OSError("torch has loaded no CUDA runtime library of its own")
    library = ctypes.CDLL(loaded[0])
    names = (
        *("cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"),
        *("cudaGetErrorString", "cudaGetLastError"),
    )
    functions = {name: getattr(library, name) for name in names}
    functions["cudaGetErrorString"].restype = ctypes.c_char_p
    return functions
