"""Which manifests are taken, judged by the bytes that they write, on a model whose loaders know two layouts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from support.toy import CPU, DTYPE, Started, Tensors, cold_start, configuration, contents, differing, land
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec, build_manifest
from weightpush_server.config import StoragePolicy
from weightpush_server.known_manifests import KnownManifests
from weightpush_server.reload import Planner, admission, finish_reload, landing, plan
from weightpush_server.ways import Way, summarise

ROWS, WIDTH, LAYERS = 4, 8, 3


class TwoLayouts(nn.Module):
    """Rows ``layers.N.weight`` by layer, or ``packed`` for all layers; those of the last one live on another rank.

    Checkpoints may leave out the bias, and loaders skip ``inv_freq``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LAYERS, ROWS, WIDTH, dtype=DTYPE), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=DTYPE), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "packed":
                for number, part in enumerate(loaded.unbind()):
                    self.weight.data[number].copy_(part)
            elif name.startswith("layers."):
                number = int(name.split(".")[1])
                if number < LAYERS:  # The others live on another rank.
                    self.weight.data[number].copy_(loaded)
            elif name == "inv_freq":
                continue
            else:
                dict(self.named_parameters())[name].data.copy_(loaded)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """vLLM collects garbage at every start, in a heap full of vLLM: leave that out."""
    gc.freeze()
    yield
    gc.unfreeze()


def separate(seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    layers = {
        f"layers.{number}.weight": torch.randn(ROWS, WIDTH, generator=generator).to(DTYPE)
        for number in range(LAYERS + 1)
    }
    norm = torch.randn(WIDTH, generator=generator)
    return {**layers, "norm": norm, "inv_freq": torch.ones(2)}


def packed(seed: int = 1) -> Tensors:
    tensors = separate(seed)
    layers = torch.stack([tensors.pop(f"layers.{number}.weight") for number in range(LAYERS)])
    return {"packed": layers, "norm": tensors["norm"]}


@pytest.fixture(scope="module")
def live() -> Started:
    return cold_start(separate(), make=TwoLayouts, vllm_config=configuration())


@pytest.fixture
def planner(live: Started) -> Planner:
    return Planner(live.model, live.layout, vllm_config=live.vllm_config, device=CPU)


def specs(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]


def refused(planner: Planner, tensors: Tensors, **options: bool) -> list[tuple[str, str]]:
    with pytest.raises(WeightPushError) as caught:
        planner.admit(specs(tensors), **options)
    assert caught.value.code is ErrorCode.MANIFEST_REJECTED
    return [(problem["kind"], problem["name"]) for problem in caught.value.details["problems"]]


def test_both_layouts_end_at_the_same_bytes(live: Started, planner: Planner) -> None:
    wanted = contents(cold_start(separate(2), make=TwoLayouts, vllm_config=live.vllm_config).model)
    for tensors in (separate(2), packed(2)):
        session = live.begin(plan=planner.admit(specs(tensors)))
        land(session, tensors)
        finish_reload(session)
        assert differing(contents(live.model), wanted) == []


@pytest.mark.case("C64", "C72")
def test_what_this_rank_has_no_use_for_may_be_left_out(planner: Planner) -> None:
    """Another rank's part, and what no loader reads; a rank that needs it refuses for itself."""
    idle = {"layers.3.weight", "inv_freq"}
    plan = planner.admit(specs({name: tensor for name, tensor in separate().items() if name not in idle}))
    assert plan.complete
    everything = planner.admit(specs(separate()))
    assert {name for name in everything.specs if everything.lands_nowhere(name)} == idle


@pytest.mark.case("C10", "C23", "C41")
def test_refusals_name_tensors_as_the_checkpoint_does(planner: Planner) -> None:
    ours, theirs = separate(), packed()
    without = {name: tensor for name, tensor in ours.items() if name != "layers.1.weight"}
    assert refused(planner, without) == [("missing", "layers.1.weight")]
    assert refused(planner, {"packed": theirs["packed"]}) == [("missing", "norm")]
    assert refused(planner, {**theirs, "packed": theirs["packed"][:2]}) == [("missing", "layers.2.weight")]
    assert ("wrong_shape", "packed") in refused(planner, {**theirs, "packed": theirs["packed"][..., :-1]})
    assert refused(planner, {**theirs, "packed": theirs["packed"].float()}) == [("wrong_dtype", "packed")]
    assert refused(planner, {**theirs, "layers.0.weight": ours["layers.0.weight"]}) == [("duplicate", "packed")]
    assert refused(planner, {**theirs, "nobody": torch.ones(1)}) == [("unknown", "nobody")]
    # A tensor that lands nowhere is legal by the cold start's plan only.
    assert refused(planner, {**theirs, "layers.7.weight": ours["layers.0.weight"]}) == [("unknown", "layers.7.weight")]
    assert planner.admit(specs({**theirs, "inv_freq": ours["inv_freq"]})).complete


@pytest.mark.case("C41")
def test_a_parameter_that_the_checkpoint_did_not_bring_is_not_written(planner: Planner) -> None:
    """A later push without it could not take it back."""
    extra = {"bias": torch.ones(WIDTH, dtype=DTYPE)}
    assert refused(planner, {**separate(), **extra}) == [("unknown", "bias")]
    assert refused(planner, {**packed(), **extra}) == [("unknown", "bias")]


def test_of_a_wholly_different_model_the_names_are_told(planner: Planner) -> None:
    other = {f"encoder.{number}": torch.ones(1) for number in range(30)}
    with pytest.raises(WeightPushError) as caught:
        planner.admit(specs(other))
    assert caught.value.details["total"] == 30 + len(separate())
    assert len(caught.value.details["problems"]) == 20
    assert caught.value.details["problems"][0]["kind"] == "unknown"


def test_a_partial_push_is_judged_by_what_it_leaves_out() -> None:
    live = cold_start(separate(), make=TwoLayouts, vllm_config=configuration(), policy=StoragePolicy.RETAIN)
    planner = Planner(live.model, live.layout, vllm_config=live.vllm_config, device=CPU)
    part = {"layers.1.weight": separate(2)["layers.1.weight"]}
    plan = planner.admit(specs(part), partial=True)
    session = live.begin(plan=plan, partial=True)
    land(session, part)
    finish_reload(session)
    wanted = {**separate(1), **part}
    oracle = cold_start(wanted, make=TwoLayouts, vllm_config=live.vllm_config)
    assert differing(contents(live.model), contents(oracle.model)) == []
    assert refused(planner, {"nobody": torch.ones(1)}, partial=True) == [("unknown", "nobody")]
    assert refused(planner, {}, partial=True) == [("empty_manifest", "")]
    # What was announced must arrive, also in a partial update.
    session = live.begin(plan=planner.admit(specs({**part, "norm": wanted["norm"]}), partial=True), partial=True)
    land(session, part)
    with pytest.raises(WeightPushError, match="'norm' never arrived"):
        finish_reload(session)


def test_of_several_ranks_the_slowest_way_of_a_tensor_counts() -> None:
    summary = summarise(6, 600, ["nppsln", "nspplp"])
    assert (summary.ignored, summary.in_place, summary.scratch, summary.via_loader) == (1, 2, 2, 1)
    assert summary.bytes == 600
    assert summarise(3, 6, ["pls", "pls"]) == summarise(3, 6, ["pls"])
    assert [*Way] == ["n", "p", "s", "l"]
    with pytest.raises(ValueError, match="expected 6"):
        summarise(6, 600, ["nppsln", "nppsl"])


def test_a_manifest_that_was_admitted_is_neither_planned_nor_compared_again(
    live: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(live.model, live.layout, vllm_config=live.vllm_config, device=CPU)
    tensors = separate()
    manifest = build_manifest([TensorSpec.of(name, tensor) for name, tensor in tensors.items()], 100)
    known = KnownManifests()
    calls: list[str] = []

    def counted(name: str, real: Callable[..., object], *args: object, **options: object) -> object:
        calls.append(name)
        return real(*args, **options)

    counting = ((plan, "make_plan"), (plan, "make_batches"), (admission, "compare_manifest"), (landing, "_ways"))
    for module, name in counting:
        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))

    def begin(specs: tuple[TensorSpec, ...]) -> None:
        admitted = planner.admit(specs)
        landing.foresee_ways(live.layout, admitted, specs)
        for number, bucket in enumerate(manifest.buckets):
            admitted.batches(bucket, manifest.table(number).entries)

    begin(manifest.tensors)
    known.keep(manifest, 1000)
    assert sorted(set(calls)) == ["_ways", "compare_manifest", "make_batches", "make_plan"]
    calls.clear()
    for _ in range(2):
        begin(known.find(manifest.digest()).tensors)
    assert calls == []
