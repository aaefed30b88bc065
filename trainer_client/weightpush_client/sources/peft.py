"""Adapters of PEFT: what is pushed is the base model with its active adapters merged, under the base model's names.

The merged tensors are computed one by one, from the gathered base weight and its adapter; the trainer's model is never
touched. Merging into the model and out again would not bring back its bits (adding and subtracting rounds twice), would
be seen by a forward pass on another thread, and would stay behind if the process died in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from weightpush_client.sources.base import rejected
from weightpush_client.sources.pieces import Gathered, Node
from weightpush_client.wrappers import without_wrappers

#: Components of names that PEFT gives to what is no part of the base model.
_LEFTOVERS: Final = frozenset(
    {
        "base_layer",
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "modules_to_save",
        "original_module",
    }
)


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into ``model``."""
    return _peft() is not None and any(map(_is_adapter, model.modules()))


def merged(model: nn.Module, nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes``, the tensors of ``model``, as those of its base model with the active adapters merged.

    A merged tensor equals what ``merge_and_unload()`` makes of it. Of ``modules_to_save`` the trained copy is taken.
    Adapters that are not active do not count.

    Raises:
        WeightPushError: ``weights_rejected``: an adapter of another kind than plain LoRA on a linear or embedding
            layer; adapters that are switched off; a tensor of an adapter that belongs to nothing.
    """
    state = _State(nodes)
    for path, module in model.named_modules():
        if _is_adapter(module):
            _take(without_wrappers(path), module, state)
    prefixes = [
        without_wrappers(f"{path}.base_model.model." if path else "base_model.model.")
        for path, module in model.named_modules()
        if isinstance(module, _peft().PeftModel)
    ]
    return [_named(node, prefixes) for node in state.nodes.values()]


class _State:
    """Tensors by name; names change in place, so that the order stays."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = {name: node.renamed(name) for node in nodes for name in [without_wrappers(node.spec.name)]}

    def below(self, prefix: str) -> list[str]:
        return [name for name in self.nodes if name.startswith(prefix)]

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            del self.nodes[name]

    def get(self, name: str) -> Node:
        try:
            return self.nodes[name]
        except KeyError:
            raise rejected(f"the adapter's {name!r} is not among the model's tensors", name) from None

    def replace(self, old: str, node: Node) -> None:
        self.nodes = {
            node.spec.name if name == old else name: node if name == old else kept for name, kept in self.nodes.items()
        }


def _peft() -> Any:
    # Whoever holds an adapter has imported it.
    return sys.modules.get("peft")


def _is_adapter(module: nn.Module) -> bool:
    peft = _peft()
    other = peft.utils.other
    # The base class of both came with 0.15.
    wrapper = getattr(other, "AuxiliaryTrainingWrapper", other.ModulesToSaveWrapper)
    return isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer | wrapper)


def _take(path: str, module: Any, state: _State) -> None:
    lora = _peft().tuners.lora.layer
    if isinstance(module, _peft().utils.other.ModulesToSaveWrapper):
        _take_trained_copy(path, module, state)
    elif type(module) is lora.Linear:
        _take_lora(path, module, state, "lora_A.{}.weight", "lora_B.{}.weight", transposed=module.fan_in_fan_out)
    elif type(module) is lora.Embedding:
        _take_lora(path, module, state, "lora_embedding_A.{}", "lora_embedding_B.{}", transposed=True)
    else:
        raise rejected(
            f"{path!r} is a {type(module).__module__}.{type(module).__qualname__}: of adapters only plain LoRA on "
            "linear and embedding layers and modules_to_save can be pushed; merge it yourself (merge_and_unload) and "
            "push the result",
            path,
        )


def _take_trained_copy(path: str, module: Any, state: _State) -> None:
    active = list(module.active_adapters)
    _refuse_switched_off(path, module)
    trained = f"{path}.modules_to_save.{active[0]}." if active else None
    if trained is None or not state.below(trained):
        # No active adapter has trained it: the original is what computes.
        trained = f"{path}.original_module."
    kept = {name: state.nodes[name] for name in state.below(trained)}
    for name, node in kept.items():
        state.replace(name, node.renamed(f"{path}.{name.removeprefix(trained)}"))
    state.drop([*state.below(f"{path}.modules_to_save."), *state.below(f"{path}.original_module.")])


def _take_lora(path: str, module: Any, state: _State, down: str, up: str, *, transposed: bool) -> None:
    active = [adapter for adapter in module.active_adapters if adapter in module.scaling]
    _refuse_switched_off(path, module)
    base = {name: state.nodes[name] for name in state.below(f"{path}.base_layer.")}
    weight = state.get(f"{path}.base_layer.weight")
    bias = base.get(f"{path}.base_layer.bias")
    if module.merged_adapters and set(module.merged_adapters) != set(active):
        raise rejected(
            f"{path!r} has adapters {sorted(module.merged_adapters)} merged and {sorted(active)} active: unmerge them "
            "(unmerge_adapter) before you push",
            path,
        )
    for adapter in [] if module.merged_adapters else active:
        variants = getattr(module, "lora_variant", {})  # Since 0.16.
        if adapter in variants or module.use_dora.get(adapter):
            kind = type(variants[adapter]).__name__ if adapter in variants else "DoRA"
            raise rejected(
                f"adapter {adapter!r} of {path!r} is no plain LoRA ({kind}): merge it yourself (merge_and_unload) and "
                "push the result",
                path,
            )
        factors = state.get(f"{path}.{down.format(adapter)}"), state.get(f"{path}.{up.format(adapter)}")
        scaling = float(module.scaling[adapter])
        weight = _sum(weight, factors, lambda a, b, s=scaling: _delta(a, b, s, transposed=transposed))
        if getattr(module, "lora_bias", {}).get(adapter):
            added = state.get(f"{path}.lora_B.{adapter}.bias")
            if bias is None:
                raise rejected(f"adapter {adapter!r} of {path!r} has a bias, and its base layer has none", path)
            bias = _sum(bias, (added,), lambda b, s=scaling: b * s)
    changed = {f"{path}.base_layer.weight": weight} | ({} if bias is None else {f"{path}.base_layer.bias": bias})
    for name, node in (base | changed).items():
        state.replace(name, node.renamed(f"{path}.{name.removeprefix(f'{path}.base_layer.')}"))
    adapters = [f"{path}.{part}." for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")]
    state.drop([name for prefix in adapters for name in state.below(prefix)])


def _refuse_switched_off(path: str, module: Any) -> None:
    if module.disable_adapters:
        raise rejected(
            f"the adapters of {path!r} are switched off: switch them on (enable_adapters), or push the base model", path
        )


def _sum(base: Node, parts: tuple[Node, ...], delta: Callable[..., torch.Tensor]) -> Node:
    """Return ``base`` plus ``delta(*parts)`` as a tensor of its own."""

    def compute(gathered: Gathered) -> torch.Tensor:
        # In this order, and rounded once: as PEFT adds in place.
        return base.compute(gathered).clone().add_(delta(*(part.compute(gathered) for part in parts)))

    return Node(base.spec, base.leaves.union(*(part.leaves for part in parts)), compute)


def _delta(down: torch.Tensor, up: torch.Tensor, scaling: float, *, transposed: bool) -> torch.Tensor:
    dtype = up.dtype
    # PEFT's own rule; another precision would give other bits than its merge.
    if up.device.type == "cpu" and dtype in {torch.float16, torch.bfloat16}:
        down, up = down.float(), up.float()
    product = up @ down
    return ((product.T if transposed else product) * scaling).to(dtype)


def _named(node: Node, prefixes: Sequence[str]) -> Node:
    name = node.spec.name
    for prefix in prefixes:
        if name.startswith(prefix):
            name = prefix.removesuffix("base_model.model.") + name.removeprefix(prefix)
    if offending := next((part for part in name.split(".") if part in _LEFTOVERS), None):
        raise rejected(
            f"{node.spec.name!r} belongs to an adapter and has no place in the base model ({offending}): "
            "merge it yourself (merge_and_unload) and push the result",
            node.spec.name,
        )
    return node if name == node.spec.name else node.renamed(name)
