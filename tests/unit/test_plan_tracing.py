"""What a plan makes of a loader: copied where it only moves elements, left to the loader where it computes.

Each loader below stands for a kind. The oracle is a cold start on the pushed tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from support.toy import CPU, DTYPE, Started, Tensors, cold_start, configuration, contents, differing, land
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.reload import finish_reload
from weightpush_server.reload.plan import Plan, PlanCache

Loader = Callable[[Any, torch.Tensor], Any]
ROWS, WIDTH = 6, 8


class OneWeight(nn.Module):
    """A weight ``weight`` with ``loader``, a bystander and a plain weight that shares nothing with it."""

    def __init__(self, loader: Loader, shape: tuple[int, ...] = (ROWS, WIDTH), dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.plain = nn.Parameter(torch.zeros(ROWS, dtype=DTYPE), requires_grad=False)
        self.loader = loader
        self.calls: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self.calls.append(name)
            if name == "plain":
                self.plain.data.copy_(loaded)
            elif name.startswith("weight"):
                self.loader(self, loaded)
            else:
                raise KeyError(name)


def checkpoint(seed: int, shape: tuple[int, ...] = (ROWS, WIDTH), dtype: torch.dtype = DTYPE) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(shape, generator=generator).to(dtype),
        "plain": torch.randn(ROWS, generator=generator).to(DTYPE),
    }


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """vLLM collects garbage at every start, in a heap full of vLLM: leave that out."""
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def _configuration() -> Any:
    # One for all tests: making it takes longer than any of them.
    return configuration()


def start(tensors: Tensors, make: Callable[[], nn.Module], *, self_check: bool = True) -> Started:
    return cold_start(tensors, make=make, self_check=self_check, vllm_config=_configuration())


def specs(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]


def pad_rows(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight[: loaded.shape[0]].data.copy_(loaded)
    model.weight[loaded.shape[0] :].data.fill_(0)


def pad_in_a_temporary(model: OneWeight, loaded: torch.Tensor) -> None:
    padded = loaded.new_zeros(model.weight.shape)
    padded[: loaded.shape[0]] = loaded
    model.weight.data.copy_(padded)


def swap_halves(model: OneWeight, loaded: torch.Tensor) -> None:
    first, second = loaded.chunk(2)
    model.weight.data.copy_(torch.cat([second, first]))


def interleave(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded.view(2, ROWS // 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH))


def stack_columns(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(torch.stack([loaded[0], *loaded[1:]], dim=0))


def bits(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.view(torch.int16).copy_(loaded.view(torch.int16))


def zero_first(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.zero_()
    model.weight.data[:, : loaded.shape[1]].copy_(loaded)


COPIED: dict[str, tuple[Loader, tuple[int, ...]]] = {
    "whole": (lambda model, loaded: model.weight.data.copy_(loaded), (ROWS, WIDTH)),
    "transposed view": (lambda model, loaded: model.weight.data.copy_(loaded.t()), (WIDTH, ROWS)),
    "transposed copy": (lambda model, loaded: model.weight.data.copy_(loaded.t().contiguous()), (WIDTH, ROWS)),
    "narrowed": (lambda model, loaded: model.weight.data.copy_(loaded.narrow(1, 3, WIDTH)), (ROWS, WIDTH + 5)),
    "broadcast": (lambda model, loaded: model.weight.data.copy_(loaded), (1, WIDTH)),
    "casting copy": (lambda model, loaded: model.weight.data.copy_(loaded.float().to(DTYPE)), (ROWS, WIDTH)),
    "setitem": (lambda model, loaded: model.weight.data.__setitem__(slice(None), loaded), (ROWS, WIDTH)),
    "to another device": (lambda model, loaded: model.weight.data.copy_(loaded.to("cpu").clone()), (ROWS, WIDTH)),
    "padding rows": (pad_rows, (ROWS - 2, WIDTH)),
    "padding in a temporary": (pad_in_a_temporary, (ROWS - 2, WIDTH)),
    "zeros first": (zero_first, (ROWS, WIDTH - 1)),
    "concatenated": (swap_halves, (ROWS, WIDTH)),
    "interleaved": (interleave, (ROWS, WIDTH)),
    "stacked": (stack_columns, (ROWS, WIDTH)),
    "as bits": (bits, (ROWS, WIDTH)),
}


@pytest.mark.case("C65")
@pytest.mark.parametrize("kind", COPIED)
def test_what_only_moves_elements_is_copied_without_a_loader(kind: str) -> None:
    loader, shape = COPIED[kind]
    wanted = contents(start(checkpoint(2, shape), make=lambda: OneWeight(loader)).model)
    live = start(checkpoint(1, shape), make=lambda: OneWeight(loader))
    plan = live.plan(checkpoint(2, shape))
    assert plan.programs.keys() == {"weight", "plain"}
    assert plan.complete
    live.model.calls.clear()
    session = live.begin(plan=plan)
    land(session, checkpoint(2, shape))
    finish_reload(session)
    assert live.model.calls == []
    assert differing(contents(live.model), wanted) == []


def transform_in_place(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded)
    model.weight.data.copy_(-model.weight.data.exp())


def multiply_in_place(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded)
    model.weight.data.mul_(2)


def branch_on_a_value(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded if loaded[0, 0].item() > 0 else loaded.flip(0))


def branch_on_what_is_there(model: OneWeight, loaded: torch.Tensor) -> None:
    sign = -1 if model.weight.data[0, 0].item() == 12345.0 else 1
    model.weight.data.copy_(loaded if sign > 0 else loaded.flip(0))


def try_and_go_on(model: OneWeight, loaded: torch.Tensor) -> None:
    try:
        reverse = loaded.flatten()[0].item() > 0
    except Exception:  # noqa: BLE001 - as careless loaders do
        reverse = False
    model.weight.data.copy_(loaded.flip(0) if reverse else loaded)


def adopt(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data = loaded.clone()


def register_anew(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=DTYPE), requires_grad=False)
    model.weight.data.copy_(loaded)


def change_the_source(model: OneWeight, loaded: torch.Tensor) -> None:
    loaded = loaded.mul_(1)
    model.weight.data.copy_(loaded)


def through_real_memory(model: OneWeight, loaded: torch.Tensor) -> None:
    temporary = torch.empty(ROWS, WIDTH, dtype=DTYPE, device="cpu")
    temporary.copy_(loaded)
    model.weight.data.copy_(temporary)


def through_numpy(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(torch.from_numpy(loaded.float().numpy().copy()))


def by_index(model: OneWeight, loaded: torch.Tensor) -> None:
    model.weight.data.copy_(loaded[torch.arange(ROWS - 1, -1, -1)])


LOADED: dict[str, Loader] = {
    "arithmetic": lambda model, loaded: model.weight.data.copy_(loaded * 2),
    "flipped": lambda model, loaded: model.weight.data.copy_(loaded.flip(0)),
    "transformed after the copy": transform_in_place,
    "multiplied after the copy": multiply_in_place,
    "a branch on a value": branch_on_a_value,
    "a branch on the parameter": branch_on_what_is_there,
    "a value asked for in vain": try_and_go_on,
    "adopted": adopt,
    "registered anew": register_anew,
    "changed source": change_the_source,
    "real temporary": through_real_memory,
    "numpy": through_numpy,
    "gathered": by_index,
}


@pytest.mark.case("C65")
@pytest.mark.parametrize("kind", LOADED)
def test_what_computes_stays_with_its_loader_alone(kind: str) -> None:
    make = lambda: OneWeight(LOADED[kind])  # noqa: E731 - the same model twice
    wanted = contents(start(checkpoint(2), make=make, self_check=False).model)
    live = start(checkpoint(1), make=make, self_check=False)
    before = contents(live.model)
    plan = live.plan(checkpoint(2))
    assert differing(contents(live.model), before) == []
    assert plan.via_loader == {"weight"}
    assert plan.programs.keys() == {"plain"}
    live.model.calls.clear()
    session = live.begin(plan=plan)
    land(session, checkpoint(2))
    assert live.model.calls == ["weight"]
    finish_reload(session)
    assert differing(contents(live.model), wanted) == []


class TwoHalves(OneWeight):
    """A weight that is put together when both of its halves have come."""

    def __init__(self) -> None:
        super().__init__(lambda model, loaded: None)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held: dict[str, torch.Tensor] = {}
        for name, loaded in weights:
            self.calls.append(name)
            if name == "plain":
                self.plain.data.copy_(loaded)
                continue
            held[name] = loaded
            if len(held) == 2:
                self.weight.data.copy_(torch.cat([held["weight.0"], held["weight.1"]]))


def test_what_is_made_of_two_tensors_stays_with_the_loader() -> None:
    def halves(seed: int) -> Tensors:
        whole = checkpoint(seed)
        first, second = whole["weight"].chunk(2)
        return {"weight.0": first, "plain": whole["plain"], "weight.1": second}

    wanted = contents(start(halves(2), make=TwoHalves).model)
    live = start(halves(1), make=TwoHalves)
    plan = live.plan(halves(2))
    assert plan.via_loader == {"weight.0", "weight.1"}
    assert plan.complete
    live.push(halves(2), planned=True)
    assert differing(contents(live.model), wanted) == []


class Unattributed(OneWeight):
    """Writes when no tensor is being loaded, so nobody can say which one it belongs to."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.weight.data[0].fill_(0)


def test_a_write_that_belongs_to_no_tensor_leaves_everything_to_the_loaders() -> None:
    make = lambda: Unattributed(COPIED["whole"][0])  # noqa: E731 - the same model twice
    wanted = contents(start(checkpoint(2), make=make).model)
    live = start(checkpoint(1), make=make)
    plan = live.plan(checkpoint(2))
    assert plan.programs == {}
    assert plan.via_loader == {"weight", "plain"}
    live.push(checkpoint(2), planned=True)
    assert differing(contents(live.model), wanted) == []


class Ignoring(OneWeight):
    """Has no use for a tensor that the checkpoint holds."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, loaded) for name, loaded in weights if name != "weight.unused")


def test_a_tensor_that_lands_nowhere_is_planned_as_such() -> None:
    tensors = {**checkpoint(1), "weight.unused": torch.ones(3)}
    live = start(tensors, make=lambda: Ignoring(COPIED["whole"][0]))
    plan = live.plan(tensors)
    assert plan.lands_nowhere("weight.unused")
    assert not plan.lands_nowhere("weight")
    session = live.begin(plan=plan)
    assert session.ways(specs(tensors)) == "ppn"
    land(session, tensors)
    finish_reload(session)


# What planning does to the model: nothing.


class Busybody(OneWeight):
    """Changes everything in reach while loading."""

    def __init__(self) -> None:
        super().__init__(COPIED["whole"][0])
        self.names: set[str] = set()
        self.flags: dict[str, bool] = {}
        self.seen: list[str] = ["start"]
        self.failing: Exception | None = None
        self.register_buffer("table", torch.ones(2))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def nosy() -> Iterator[tuple[str, torch.Tensor]]:
            for name, loaded in weights:
                self.names.add(name)
                self.flags[name] = True
                self.seen.append(name)
                self.loaded = True
                self.table.mul_(2)
                self.register_parameter("born", nn.Parameter(torch.ones(1), requires_grad=False))
                yield name, loaded
                if self.failing is not None:
                    raise self.failing

        super().load_weights(nosy())


@pytest.mark.case("C4", "C42")
@pytest.mark.parametrize("failure", [None, RuntimeError("no"), KeyError("no"), MemoryError()])
def test_planning_leaves_no_trace_also_when_a_loader_raises(failure: Exception | None) -> None:
    live = start(checkpoint(1), make=Busybody, self_check=False)
    del live.model._parameters["born"]
    del live.model.loaded
    live.model.names.clear()
    live.model.failing = failure
    before, attributes = contents(live.model), dict(vars(live.model))
    inside = {key: value.copy() for key, value in attributes.items() if type(value) in (dict, list, set)}
    objects = {name: id(tensor) for name, tensor in live.model.named_parameters()}
    addresses = {name: tensor.data_ptr() for name, tensor in live.model.named_parameters()}
    live.plan(checkpoint(2))
    assert differing(contents(live.model), before) == []
    assert {name: id(tensor) for name, tensor in live.model.named_parameters()} == objects
    assert {name: tensor.data_ptr() for name, tensor in live.model.named_parameters()} == addresses
    assert vars(live.model).keys() == attributes.keys()
    assert all(vars(live.model)[key] is value for key, value in attributes.items())
    assert {key: attributes[key] for key in inside} == inside


def test_an_interrupt_while_planning_puts_everything_back() -> None:
    def interrupted(model: OneWeight, loaded: torch.Tensor) -> None:
        if loaded.is_meta:
            raise KeyboardInterrupt
        model.weight.data.copy_(loaded)

    live = start(checkpoint(1), make=lambda: OneWeight(interrupted))
    before = contents(live.model)
    with pytest.raises(KeyboardInterrupt):
        live.plan(checkpoint(2))
    assert differing(contents(live.model), before) == []
    assert not any(tensor.is_meta for tensor in live.model.parameters())


def test_a_loader_that_writes_past_the_tables_does_not_reach_the_live_weight() -> None:
    """It holds the parameter itself; while planning it must not be written, and its tensor goes to the loader."""
    held: list[torch.Tensor] = []

    def stubborn(model: OneWeight, loaded: torch.Tensor) -> None:
        if not held:
            held.append(model.plain.data)
        model.weight.data.copy_(loaded)
        held[0][0] = 7.0

    live = start(checkpoint(1), make=lambda: OneWeight(stubborn), self_check=False)
    live.model.plain.data.fill_(1.0)
    plan = live.plan(checkpoint(2))
    assert plan.via_loader >= {"weight"}
    assert live.model.plain.data.tolist() == [1.0] * ROWS


def _cache(live: Started) -> PlanCache:
    return PlanCache(live.model, live.layout, vllm_config=live.vllm_config, device=CPU)


def test_a_plan_is_made_once_for_a_manifest_whatever_the_order_of_its_tensors() -> None:
    live = start(checkpoint(1), make=lambda: OneWeight(COPIED["whole"][0]))
    cache = _cache(live)
    first = cache.plan(specs(checkpoint(1)))
    live.model.calls.clear()
    assert cache.plan(specs(checkpoint(2))[::-1]) is first
    assert live.model.calls == []
    others: list[Plan] = [cache.plan([TensorSpec(name="plain", dtype="bfloat16", shape=(6,))][:1]) for _ in range(2)]
    assert others[0] is others[1] is not first


def test_only_the_last_few_manifests_are_kept() -> None:
    live = start(checkpoint(1), make=lambda: OneWeight(COPIED["broadcast"][0]))
    cache = _cache(live)
    wanted = specs(checkpoint(1))
    first = cache.plan(wanted)
    for rows in range(2, 8):
        cache.plan([TensorSpec(name="weight", dtype="bfloat16", shape=(rows, WIDTH)), wanted[1]])
    assert cache.plan(wanted) is not first
