"""Every tensor that a model can compute with, and one digest over all of them.

Post-load processing puts tensors where ``named_parameters`` does not look: plain attributes, quantization methods and
their kernels, closures. A comparison that leaves those out calls a wrong model right.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import torch
from torch import nn

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.dtypes import dtype_name
from weightpush_server.reload.coverage import ByteRanges, covered_ranges
from weightpush_server.reload.storage import byte_range, storage_id

#: Attribute of a model under which its recorded layout lies; it holds tensors that no forward reads.
LAYOUT_ATTRIBUTE: Final = "_weightpush_layout"

#: What modules hold that is not weights: the cache of running requests, and our own record.
_NOT_WEIGHTS: Final = frozenset({"kv_cache", LAYOUT_ATTRIBUTE})

#: nn.Module's own bookkeeping: tensors and children are visited by name, hooks hold none.
MODULE_INTERNALS: Final = frozenset(nn.Module().__dict__)

#: Packages whose objects are part of a layer: quantization methods, kernels, attention implementations.
_PART_OF_A_LAYER: Final = ("vllm.model_executor.", "vllm.models.", "vllm.v1.attention.")

#: Package of the modules that vLLM puts around layers to add adapters. What they hold themselves comes and goes with
#: requests and is nobody's checkpoint; what they wrap is.
_ADAPTERS: Final = "vllm.lora."


#: Values of these types hold no tensors. Most attributes are of them, so they are told first and by their exact type.
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def tensor_objects(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every tensor object reachable from ``model`` with a path, each object once, in an order that only the
    structure decides (names are visited in sorted order, so it does not matter when an attribute was set)."""
    found: list[tuple[str, torch.Tensor]] = []
    _visit("", model, {}, found)
    return found


def _visit(path: str, value: Any, seen: dict[int, Any], found: list[tuple[str, torch.Tensor]]) -> None:
    if isinstance(value, (bool, int, float, complex, str, bytes, type)) or value is None or id(value) in seen:
        return
    # The reference keeps the object alive, so that its id stays its own during the walk.
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return
    for name, child in _children(value):
        _visit(f"{path}.{name}" if path else name, child, seen, found)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module) and type(value).__module__.startswith(_ADAPTERS):
        yield from ((name, child) for name, child in value._modules.items() if name == "base_layer")
    elif isinstance(value, nn.Module):
        for held in (value._parameters, value._buffers, value._modules):
            yield from _sorted_items(held)
        yield from _sorted_items(value.__dict__, without=MODULE_INTERNALS)
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        yield from _sorted_items(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _function_children(value)
    elif _is_part_of_a_layer(value):
        yield from _sorted_items(getattr(value, "__dict__", {}))


def _sorted_items(mapping: Mapping[Any, Any], without: frozenset[str] = frozenset()) -> list[tuple[str, Any]]:
    items = [
        (str(key), value)
        for key, value in mapping.items()
        if type(value) not in _PLAIN and key not in _NOT_WEIGHTS and key not in without
    ]
    items.sort(key=itemgetter(0))
    return items


def _function_children(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the cell is empty: its variable was deleted or not set yet
            continue
    yield "defaults", function.__defaults__
    yield "kwdefaults", function.__kwdefaults__


def _is_part_of_a_layer(value: Any) -> bool:
    cls = type(value)
    return cls.__module__.startswith(_PART_OF_A_LAYER) or callable(getattr(cls, "process_weights_after_loading", None))


def reachable_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(path, tensor)`` for everything that ``model`` computes with, in a stable order.

    Parameters, buffers, plain attributes, containers, quantization methods, kernels, closures and partials are
    searched. Bytes that several tensors share are yielded once, under their first path. Handles of native libraries
    hide what they packed; nothing shows it but the layer's own forward.
    """
    covered: dict[int, ByteRanges] = {}
    for path, tensor in tensor_objects(model):
        if tensor.is_meta or tensor.layout != torch.strided:
            yield path, tensor
            continue
        ranges = ByteRanges()
        if tensor.is_contiguous():
            ranges.add_pair(*byte_range(tensor))
        else:
            ranges.add(covered_ranges(tensor))
        before = covered.get(storage_id(tensor))
        if before is None:
            covered[storage_id(tensor)] = ranges
            yield path, tensor
        elif not len(ranges) or before.first_missing(ranges) is not None:
            before.add(ranges.merged())
            yield path, tensor


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """What one reachable tensor holds: dtype, shape and digest. ``is_parameter``: a module registers it as one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str
    is_parameter: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} {self.digest}"


def tensor_prints(model: nn.Module) -> dict[str, TensorPrint]:
    """Return the print of every reachable tensor by its path. Reads all weights once."""
    return prints_of(reachable_tensors(model))


def prints_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorPrint]:
    """Return the print of each of ``tensors``, which :func:`reachable_tensors` found, by its path. Reads them all."""
    return {
        path: TensorPrint(tensor.dtype, tuple(tensor.shape), _digest(tensor), isinstance(tensor, nn.Parameter))
        for path, tensor in tensors
    }


def combine_prints(prints: Mapping[str, TensorPrint]) -> str:
    """Return one digest (64 hex digits) over ``prints``, in their order."""
    total = hashlib.sha256()
    for path, found in prints.items():
        total.update(f"{path}|{found.dtype}|{list(found.shape)}|{found.digest}\n".encode())
    return total.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Return one digest (64 hex digits) of paths, dtypes, shapes and contents of all reachable tensors.

    Two models with the same fingerprint hold the same weights; addresses, strides and devices do not enter.
    """
    return combine_prints(tensor_prints(model))


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    try:
        dtype_name(tensor.dtype)
    except ValueError:
        # Runtime formats know dtypes that never travel (complex rotary tables, packed scales): take their bytes.
        tensor = tensor.detach().contiguous().flatten().view(torch.uint8)
    return tensor_digest(tensor)
