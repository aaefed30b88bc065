"""Everything that a module can compute with is found, once, in an order that only structure decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weightpush_server.reload.fingerprint import LAYOUT_ATTRIBUTE, fingerprint, reachable_tensors


class Method:
    """Stands for a quantization method: its class says that it takes part in post-load processing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError


def _ones() -> torch.Tensor:
    return torch.ones(2, 3)


def _closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


@pytest.mark.parametrize(
    ("hide", "path"),
    [
        (lambda t: t, "hidden"),
        (lambda t: [None, t], "hidden.1"),
        (lambda t: {"scale": (t,)}, "hidden.scale.0"),
        (_closure, "hidden.tensor"),
        (lambda t: functools.partial(torch.add, t), "hidden.args.0"),
        (lambda t: functools.partial(torch.add, other=t), "hidden.keywords.other"),
        (lambda t: Method({"w": t}), "hidden.kernel.w"),
        (lambda t: Method(_closure(t)), "hidden.kernel.tensor"),
    ],
)
def test_a_tensor_is_found_wherever_it_hides(hide: Callable[[torch.Tensor], Any], path: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    tensor = _ones()
    model[0].hidden = hide(tensor)
    found = dict(reachable_tensors(model))
    assert found[f"0.{path}"] is tensor
    before = fingerprint(model)
    tensor[1, 2] = 7
    assert fingerprint(model) != before


def test_caches_of_requests_and_our_record_are_no_weights() -> None:
    model = nn.Linear(3, 2)
    before = fingerprint(model)
    model.kv_cache = [_ones()]
    model.__dict__[LAYOUT_ATTRIBUTE] = [_ones()]
    assert fingerprint(model) == before


def test_order_of_assignment_does_not_matter() -> None:
    first, second = nn.Module(), nn.Module()
    for module, names in ((first, "ab"), (second, "ba")):
        for name in names:
            setattr(module, name, torch.full((2,), float(ord(name))))
            module.register_parameter(f"p_{name}", nn.Parameter(torch.full((2,), float(ord(name)))))
    assert [name for name, _ in reachable_tensors(first)] == [name for name, _ in reachable_tensors(second)]
    assert fingerprint(first) == fingerprint(second)


def test_shared_bytes_count_once_and_other_parts_of_a_storage_do() -> None:
    model = nn.Module()
    base = torch.arange(10.0)
    model.a = base[:4]
    model.b = base[4:]
    model.c = base[2:6]
    model.d = base
    assert [name for name, _ in reachable_tensors(model)] == ["a", "b"]


def test_names_dtypes_and_shapes_enter() -> None:
    def with_attribute(name: str, tensor: torch.Tensor) -> nn.Module:
        model = nn.Module()
        setattr(model, name, tensor)
        return model

    zeros = [
        with_attribute("a", torch.zeros(4)),
        with_attribute("b", torch.zeros(4)),
        with_attribute("a", torch.zeros(2, 2)),
        with_attribute("a", torch.zeros(4, dtype=torch.int32)),
        with_attribute("a", torch.zeros(2, dtype=torch.complex64)),
    ]
    assert len({fingerprint(model) for model in zeros}) == len(zeros)
