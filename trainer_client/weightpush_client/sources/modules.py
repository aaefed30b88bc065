"""A module as groups of tensors: its parameters and persistent buffers, whoever has sharded them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from weightpush_client.sources.base import rejected
from weightpush_client.sources.fsdp import fsdp_units
from weightpush_client.sources.groups import Group, group_of
from weightpush_client.sources.zero import PartitionedParameter, is_zero3


def groups_of(model: nn.Module) -> list[Group]:
    """Return what ``model`` holds under the names of its ``state_dict()``, gathering nothing.

    Raises:
        WeightPushError: ``weights_rejected``: something in it cannot be pushed; it is named.
    """
    if units := fsdp_units(model):
        flat = set().union(*(unit.parameters for unit in units))
        rest = [group_of(name, tensor) for module, own, name, tensor in _own(model) if (id(module), own) not in flat]
        return [*units, *rest]
    if any(is_zero3(parameter) for parameter in model.parameters()):
        return [
            PartitionedParameter(name, tensor) if is_zero3(tensor) else group_of(name, tensor)
            for _, _, name, tensor in _own(model)
        ]
    # Hooks of wrappers have their say here, and FSDP2 brings back what a forward pass left gathered.
    return [group_of(name, _tensor(name, value)) for name, value in model.state_dict().items()]


def _own(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield (module, name there, full name, tensor): what ``state_dict()`` has, without its hooks, which gather."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in module._parameters.items():
            # FSDP1 registers the flat storage as a parameter of its own.
            if tensor is not None and not name.endswith("_flat_param"):
                yield module, name, prefix + name, tensor
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield module, name, prefix + name, buffer


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise rejected(f"{name!r} is a {type(value).__name__}, expected a tensor; leave it out of what you push", name)
    return value
