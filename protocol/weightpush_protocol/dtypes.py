"""The dtypes that travel: one table for torch, our wire name and the safetensors code."""

from __future__ import annotations

from typing import Final

import torch

# Wire name -> (torch dtype, safetensors code). Codes as in the safetensors format description.
_TABLE: Final[dict[str, tuple[torch.dtype, str]]] = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float8_e4m3fn": (torch.float8_e4m3fn, "F8_E4M3"),
    "float8_e5m2": (torch.float8_e5m2, "F8_E5M2"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "bool": (torch.bool, "BOOL"),
}

_NAME_OF_TORCH: Final = {dtype: name for name, (dtype, _) in _TABLE.items()}
_NAME_OF_CODE: Final = {code: name for name, (_, code) in _TABLE.items()}

DTYPE_NAMES: Final = frozenset(_TABLE)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a wire name. Raises ``KeyError`` for a name that does not travel."""
    return _TABLE[name][0]


def itemsize(name: str) -> int:
    """Return the bytes of one element."""
    return _TABLE[name][0].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a torch dtype.

    Raises:
        ValueError: this dtype cannot travel (complex, quantized, packed sub-byte types).
    """
    try:
        return _NAME_OF_TORCH[dtype]
    except KeyError:
        raise ValueError(f"{dtype} cannot be pushed; known are {', '.join(sorted(_TABLE))}") from None


def safetensors_code(name: str) -> str:
    """Return the code that a safetensors header uses for this dtype."""
    return _TABLE[name][1]


def name_of_safetensors_code(code: str) -> str:
    """Return the wire name of a safetensors dtype code. Raises ``KeyError`` for an unknown code."""
    return _NAME_OF_CODE[code]
