"""transformers 5 keeps some models in another layout than their checkpoints (packed experts, fused projections).

Its own way back, the one that ``save_pretrained`` uses, is asked for every tensor, group by group. Which tensors belong
to one group is found by running it once on tensors without data that remember where they come from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weightpush_client.sources.base import rejected, spec_of
from weightpush_client.sources.pieces import Gathered, Node
from weightpush_client.wrappers import without_wrappers
from weightpush_protocol.manifest import TensorSpec

#: Of each tensor of a model: dtype and shape.
_Shapes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
_Revert = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def as_saved(model: nn.Module, nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes``, the tensors of ``model``, under the names and in the shapes of its checkpoint.

    Nothing changes where ``model`` holds no transformers model, or holds it as its checkpoint does.

    Raises:
        WeightPushError: ``weights_rejected``: transformers cannot bring a tensor back.
    """
    found = _transformers_model(model)
    if found is None:
        return list(nodes)
    prefix, inner, revert = found
    ignored = set(getattr(inner, "_keys_to_ignore_on_save", None) or ())
    inside = {
        name.removeprefix(prefix): node
        for node in nodes
        for name in [without_wrappers(node.spec.name)]
        if name.startswith(prefix) and name.removeprefix(prefix) not in ignored
    }
    saved = _revert_all(inner, inside, revert)
    if saved.keys() == inside.keys() and all(saved[name] is node for name, node in inside.items()):
        return [node for node in nodes if without_wrappers(node.spec.name).removeprefix(prefix) not in ignored]
    outside = [node for node in nodes if not without_wrappers(node.spec.name).startswith(prefix)]
    named = (node if node.spec.name == prefix + name else node.renamed(prefix + name) for name, node in saved.items())
    return [*named, *outside]


def _transformers_model(model: nn.Module) -> tuple[str, nn.Module, _Revert] | None:
    transformers = sys.modules.get("transformers")
    loading = sys.modules.get("transformers.core_model_loading")
    # Before version 5 the layouts were the same.
    revert = getattr(loading, "revert_weight_conversion", None)
    if transformers is None or revert is None:
        return None
    for path, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            # As the names of its tensors start: what PEFT puts before them is gone already.
            *parts, _ = without_wrappers(f"{path}.tensor" if path else "tensor").split(".")
            if parts[-2:] == ["base_model", "model"]:
                parts = parts[:-2]
            return "".join(f"{part}." for part in parts), module, partial(_reverted, revert, module)
    return None


def _reverted(revert: Any, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    try:
        result: Mapping[str, torch.Tensor] = revert(model, dict(tensors))
    except Exception as error:
        raise rejected(
            f"transformers cannot bring {', '.join(list(tensors)[:3])} back to the layout of its checkpoint: "
            f"{type(error).__name__}: {error}",
            next(iter(tensors)),
        ) from error
    return result


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A tensor of the checkpoint: made of ``sources``, tensors of the model, or the only one of them ``untouched``."""

    name: str
    sources: tuple[str, ...]
    spec: TensorSpec
    untouched: bool


#: Which tensors go in, and what becomes of them. It takes long with thousands of experts, and is the same every time.
_known: WeakKeyDictionary[nn.Module, tuple[_Shapes, list[_Recipe]]] = WeakKeyDictionary()


def _revert_all(model: nn.Module, nodes: Mapping[str, Node], revert: _Revert) -> dict[str, Node]:
    """Return what ``revert`` makes of ``nodes``, the tensors of ``model``, in the order in which it yields them."""
    shapes = {name: (node.spec.dtype, node.spec.shape) for name, node in nodes.items()}
    kept = _known.get(model)
    if kept is None or kept[0] != shapes or list(kept[0]) != list(shapes):
        kept = _known[model] = shapes, list(_trace(nodes, revert))
    saved: dict[str, Node] = {}
    for recipe in kept[1]:
        inputs = {source: nodes[source] for source in recipe.sources}
        if recipe.untouched:
            (node,) = inputs.values()
            saved[recipe.name] = node if recipe.name in inputs else node.renamed(recipe.name)
            continue
        leaves = frozenset().union(*(node.leaves for node in inputs.values()))
        saved[recipe.name] = Node(recipe.spec, leaves, partial(_made, recipe.name, inputs, revert))
    return saved


def _trace(nodes: Mapping[str, Node], revert: _Revert) -> Iterator[_Recipe]:
    for name, result in revert({name: _Traced.of(name, node) for name, node in nodes.items()}).items():
        sources = tuple(sorted(_sources(result)))
        if not sources:
            raise rejected(f"transformers makes {name!r} of no tensor of the model", name)
        untouched = isinstance(result, _Traced) and result.untouched
        plain = torch.empty(1, dtype=result.dtype).expand(tuple(result.shape))
        yield _Recipe(name, sources, spec_of(name, plain), untouched)


def _made(name: str, inputs: Mapping[str, Node], revert: _Revert, gathered: Gathered) -> torch.Tensor:
    made = gathered.once(
        tuple(inputs), lambda: revert({source: node.compute(gathered) for source, node in inputs.items()})
    )
    if name not in made:
        raise rejected(f"transformers made no {name!r} of {', '.join(inputs)}, as it did without data", name)
    return made[name]


class _Traced(torch.Tensor):
    """A tensor without data that remembers the names of the tensors it was made of."""

    sources: frozenset[str]
    #: Whether it is still exactly the tensor that went in.
    untouched: bool

    @classmethod
    def of(cls, name: str, node: Node) -> _Traced:
        """Return a stand-in for ``node``."""
        empty = torch.empty(node.spec.shape, dtype=node.spec.torch_dtype, device="meta")
        traced = empty.as_subclass(cls)
        traced.sources, traced.untouched = frozenset({name}), True
        return traced

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        sources = _sources([args, kwargs or {}])
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return _mark(result, sources)


def _sources(value: Any) -> frozenset[str]:
    if isinstance(value, _Traced):
        return getattr(value, "sources", frozenset())
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | torch.Tensor):
        return frozenset().union(*map(_sources, value))
    return frozenset()


def _mark(value: Any, sources: frozenset[str]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            return value
        traced = value.as_subclass(_Traced)
        traced.sources, traced.untouched = sources, False
        return traced
    if isinstance(value, tuple | list) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_mark(item, sources) for item in value)
    return value
