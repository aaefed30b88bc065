"""FSDP1 (``FullyShardedDataParallel``): parameters lie flat, one storage a unit, and a unit is gathered whole."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weightpush_client.sources.base import spec_of
from weightpush_protocol.manifest import TensorSpec


def fsdp_units(model: nn.Module) -> list[FsdpUnit]:
    """Return the FSDP1 units in ``model``, outermost first; none where it has no FSDP1."""
    # Whoever holds such a module has imported it; importing it here would cost seconds.
    package = sys.modules.get("torch.distributed.fsdp")
    if package is None:
        return []
    units = []
    roots: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if not isinstance(module, package.FullyShardedDataParallel):
            continue
        root = next((root for prefix, root in roots if path.startswith(prefix)), None)
        if root is None:
            root = module
            roots.append((f"{path}." if path else "", module))
        if (handle := module._handle) is not None:
            units.append(FsdpUnit(package.FullyShardedDataParallel, path, module, root, handle.flat_param))
    return units


class FsdpUnit:
    """One FSDP1 unit with all parameters that it flattens, shared ones under each of their names.

    Gathered as in a forward pass, in the dtype of the trainer's own parameters.
    """

    def __init__(self, fsdp: Any, path: str, unit: Any, root: Any, flat: Any) -> None:
        self._fsdp = fsdp
        self._unit = unit
        self._root = root
        self._flat = flat
        #: name -> (module that has it, its name there, name of the first parameter that it shares)
        self._places: dict[str, tuple[nn.Module, str, str]] = {}
        specs = []
        prefix = f"{path}." if path else ""
        # Paths of parameters are relative to the wrapped module, which the unit calls so.
        prefix += "_fsdp_wrapped_module."
        shapes = {}
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            name = prefix + _joined(info.module_name, info.param_name)
            self._places[name] = (info.module, info.param_name, name)
            shapes[name] = shape
        for info in flat._shared_param_infos:
            name = prefix + _joined(info.module_name, info.param_name)
            first = prefix + _joined(info.prim_module_name, info.prim_param_name)
            self._places[name] = (info.module, info.param_name, first)
            shapes[name] = shapes[first]
        for name, shape in shapes.items():
            # Expanded from one element: what matters is shape and dtype.
            specs.append(spec_of(name, torch.empty(1, dtype=flat.dtype).expand(shape)))
        self.specs: tuple[TensorSpec, ...] = tuple(specs)

    @property
    def ranks(self) -> int:
        """How many ranks hold a part of the unit."""
        sharded = self._unit._handle.uses_sharded_strategy
        ranks: int = self._unit.process_group.size() if sharded else 1
        return ranks

    @property
    def device(self) -> torch.device:
        """Device on which the unit is gathered."""
        device: torch.device = self._unit.compute_device
        return device

    @property
    def parameters(self) -> set[tuple[int, str]]:
        """Parameters that are part of the unit, as id of their module and name there."""
        return {(id(module), name) for module, name, _ in self._places.values()}

    def identity(self, name: str) -> Hashable | None:
        """Return the name of the first parameter that shares the memory."""
        return (id(self._flat), self._places[name][2])

    def check(self) -> None:
        """Do nothing: shapes are fixed when FSDP wraps a module."""

    @contextmanager
    def gather(self, dtype: torch.dtype | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Gather the unit, and free it when the context ends. Must not be called inside forward or backward."""
        if self._root._is_root is None:
            # Before its first forward, the first unit that is touched would take itself for the root.
            with self._fsdp.summon_full_params(self._root, recurse=False, writeback=False):
                pass
        with self._fsdp.summon_full_params(self._unit, recurse=False, writeback=False):
            yield {name: getattr(module, parameter).detach() for name, (module, parameter, _) in self._places.items()}


def _joined(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name
