"""transformers 5 keeps some models in another layout than their checkpoints (packed experts, fused projections).

Its own way back, the one that ``save_pretrained`` uses, is asked for every tensor, group by group. Which tensors belong
to one group is found by running it once on tensors without data that remember where they come from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weightpush_client.sources.base import rejected, spec_of
from weightpush_client.sources.pieces import Gathered, LeafView, Node
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
    """A tensor of the checkpoint: made of ``sources``, tensors of the model, or the only one of them ``untouched``.

    ``view``: which elements of its only source it holds, where it holds nothing else.
    """

    name: str
    sources: tuple[str, ...]
    spec: TensorSpec
    untouched: bool
    view: LeafView | None


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
        view = recipe.view
        if view is not None:
            leaf = inputs[view.leaf].leaf
            view = view._replace(leaf=leaf) if leaf is not None else None
        saved[recipe.name] = Node(recipe.spec, leaves, partial(_made, recipe.name, inputs, revert), view=view)
    return saved


def _trace(nodes: Mapping[str, Node], revert: _Revert) -> Iterator[_Recipe]:
    stand_ins = {name: _Traced.of(name, node) for name, node in nodes.items()}
    # Before they are converted, which may change them.
    originals = {name: stand_in.shadow for name, stand_in in stand_ins.items()}
    for name, result in revert(stand_ins).items():
        sources = tuple(sorted(_sources(result)))
        if not sources:
            raise rejected(f"transformers makes {name!r} of no tensor of the model", name)
        untouched = isinstance(result, _Traced) and result.untouched
        plain = torch.empty(1, dtype=result.dtype).expand(tuple(result.shape))
        view = _view(sources[0], originals[sources[0]], result) if len(sources) == 1 else None
        yield _Recipe(name, sources, spec_of(name, plain), untouched, view)


def _view(name: str, original: torch.Tensor | None, result: torch.Tensor) -> LeafView | None:
    """Return which elements of tensor ``name``, whose stand-in was ``original``, ``result`` holds; None if others."""
    shadow = getattr(result, "shadow", None)
    if shadow is None or original is None or not _shares(shadow, original) or shadow.shape != result.shape:
        return None
    return LeafView(name, int(shadow.storage_offset()), tuple(shadow.shape), tuple(shadow.stride()))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without data would have the same memory, and read it alike."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.dtype is other.dtype and not one.is_neg()


def _made(name: str, inputs: Mapping[str, Node], revert: _Revert, gathered: Gathered) -> torch.Tensor:
    made = gathered.once(
        tuple(inputs), lambda: revert({source: node.compute(gathered) for source, node in inputs.items()})
    )
    if name not in made:
        raise rejected(f"transformers made no {name!r} of {', '.join(inputs)}, as it did without data", name)
    return made[name]


#: What copies a tensor and changes none of its elements.
_COPIES: Final = frozenset({torch.Tensor.contiguous, torch.Tensor.clone, torch.clone})


class _Traced(torch.Tensor):
    """A tensor without data that remembers the names of the tensors it was made of."""

    sources: frozenset[str]
    #: Whether it is still exactly the tensor that went in.
    untouched: bool
    #: The same elements where they lie in the tensor that went in, had nothing been copied; None where they were not
    #: only moved.
    shadow: torch.Tensor | None

    @classmethod
    def of(cls, name: str, node: Node) -> _Traced:
        """Return a stand-in for ``node``."""
        empty = torch.empty(node.spec.shape, dtype=node.spec.torch_dtype, device="meta")
        traced = empty.as_subclass(cls)
        traced.sources, traced.untouched, traced.shadow = frozenset({name}), True, empty
        return traced

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        sources = _sources([args, kwargs or {}])
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            shadows = _shadowed(function, args, kwargs or {})
        return _mark(result, sources, shadows)


def _shadowed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what ``function`` makes of the shadow of its first argument, if it only moves elements; else None."""
    first = args[0] if args else None
    shadow = first.shadow if isinstance(first, _Traced) else None
    name = getattr(function, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs
    if writes:
        for argument in [*args, *kwargs.values()]:
            if isinstance(argument, _Traced):
                argument.shadow = None
    if shadow is None or writes or _sources([args[1:], kwargs]):
        return None
    if function in _COPIES:
        return shadow
    try:
        made = function(shadow, *args[1:], **kwargs)
    except RuntimeError:
        return None  # It asks for contiguous elements.
    parts = made if isinstance(made, tuple | list) else [made]
    views = all(isinstance(part, torch.Tensor) and _shares(part, shadow) for part in parts)
    return made if views else None


def _sources(value: Any) -> frozenset[str]:
    if isinstance(value, _Traced):
        return getattr(value, "sources", frozenset())
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | torch.Tensor):
        return frozenset().union(*map(_sources, value))
    return frozenset()


def _mark(value: Any, sources: frozenset[str], shadow: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            return value
        traced = value.as_subclass(_Traced)
        traced.sources, traced.untouched = sources, False
        traced.shadow = shadow if isinstance(shadow, torch.Tensor) else None
        return traced
    if isinstance(value, tuple | list) and any(isinstance(item, torch.Tensor) for item in value):
        alike = isinstance(shadow, tuple | list) and len(shadow) == len(value)
        shadows = shadow if alike else [None] * len(value)
        return type(value)(_mark(item, sources, own) for item, own in zip(value, shadows, strict=True))
    return value
