"""Where the weights of a push come from: a module, a mapping, pairs, or a checkpoint directory.

Every kind becomes a `WeightSource`: specifications first, tensors later, in one order.

==================================== ===========================================================================
``nn.Module``                        its ``state_dict()``: parameters and persistent buffers, never the others.
                                     Sharded ones (FSDP2, FSDP1, tensor parallelism, ZeRO-3) are gathered piece by
                                     piece; LoRA adapters are merged on the way; a transformers model comes in the
                                     layout of its checkpoint
mapping of name to tensor            its items, in its order; DTensors are gathered one by one
iterable of ``(name, tensor)``       read to its end before the push begins: the specifications must be known first.
                                     References are kept, not copies, so each tensor must keep its bytes until the
                                     push ends. A generator that refills one buffer is refused.
object with ``metadata()``           a source as vLLM's weight-transfer engines take it, read as it is needed
``str`` or path                      a directory with a safetensors checkpoint, read tensor by tensor while pushing
==================================== ===========================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from weightpush_client.sources.base import WeightSource, rejected
from weightpush_client.sources.checkpoint import CheckpointSource
from weightpush_client.sources.conversion import as_saved
from weightpush_client.sources.groups import Group, group_of
from weightpush_client.sources.modules import groups_of
from weightpush_client.sources.peft import has_adapters, merged
from weightpush_client.sources.pieces import Node, PieceSource
from weightpush_client.sources.streamed import StreamedSource, is_streamed

__all__ = ["CheckpointSource", "ModuleSource", "PieceSource", "TensorSource", "WeightSource", "Weights", "open_source"]

Weights: TypeAlias = (
    nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str]
)


def open_source(weights: Weights) -> WeightSource:
    """Return the source of ``weights``.

    Raises:
        WeightPushError: ``weights_rejected``: something in it cannot be pushed; the first offender is named.
        TypeError: ``weights`` is none of the kinds above.
    """
    if isinstance(weights, str | os.PathLike):
        return CheckpointSource(weights)
    if isinstance(weights, nn.Module):
        return ModuleSource(weights)
    if is_streamed(weights):
        return StreamedSource(weights)
    if isinstance(weights, Mapping):
        return TensorSource(weights.items())
    if isinstance(weights, Iterable) and not isinstance(weights, torch.Tensor | bytes):
        return TensorSource(weights)
    raise TypeError(
        f"cannot push a {type(weights).__name__}: give a module, a state dict, (name, tensor) pairs or a directory"
    )


class ModuleSource(PieceSource):
    """A module, whoever has wrapped, sharded or adapted it. Its tensors are never changed."""

    def __init__(self, model: nn.Module) -> None:
        groups = groups_of(model)
        nodes = [Node.of(spec) for group in groups for spec in group.specs]
        if has_adapters(model):
            nodes = merged(model, nodes)
        super().__init__(groups, as_saved(model, nodes))


class TensorSource(PieceSource):
    """Tensors in memory. Keeps references and never copies; ``requires_grad`` does not matter."""

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        groups: list[Group] = []
        held: dict[str, tuple[torch.Tensor, int]] = {}
        for name, tensor in _checked_pairs(pairs):
            if name in held:
                raise rejected(f"the source names tensor {name!r} twice", name)
            groups.append(group_of(name, tensor))
            held[name] = (tensor, _writes(tensor))
        for name, (tensor, writes) in held.items():
            if _writes(tensor) != writes:
                raise rejected(
                    f"tensor {name!r} was overwritten after the source yielded it; "
                    "yield tensors that keep their bytes until the push ends, e.g. a clone of a reused buffer",
                    name,
                )
        super().__init__(groups)


def _checked_pairs(pairs: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise rejected(f"item {number} of the source is a {type(pair).__name__}, expected (name, tensor)")
        name, tensor = pair
        if not isinstance(name, str):
            raise rejected(f"item {number} of the source has a name of type {type(name).__name__}, expected str")
        if not isinstance(tensor, torch.Tensor):
            raise rejected(
                f"{name!r} is a {type(tensor).__name__}, expected a tensor; leave it out of what you push", name
            )
        yield name, tensor


def _writes(tensor: torch.Tensor) -> int:
    # Tensors made under inference_mode do not count writes.
    return 0 if tensor.is_inference() else tensor._version
