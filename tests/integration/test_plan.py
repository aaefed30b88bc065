"""Pushes by plan: bit-exact without a loader, other layouts of a checkpoint, and what a plan refuses before any write.

The oracle for A is the cold start on A; for B the push by the model's own loaders, which other tests compare with a
cold start on B. Engines run in this process, one after another.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.models.utils import AutoWeightsLoader

from integration.conftest import PROMPTS, Checkpoints
from support.engine import (
    Tensors,
    engine,
    generate,
    planner,
    push,
    push_by,
    read,
    snapshot,
    specs,
)
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload import Planner, check_reloadable
from weightpush_server.reload.layout import find_layout

#: One a hazard; the eight of test_reload_engine.py are pushed by plan there.
FAST = ("gpt_oss", "phi", "bloom", "mamba2")
SLOW = (
    "deepseek_v2",
    "qwen3_next",
    "mistral",
    "qwen2_tied",
    "olmoe",
    "gemma2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "granite",
    "granitemoe",
    "glm4",
    "glm4_moe",
    "deepseek_v2_noq",
    "starcoder2",
    "cohere",
)
#: What loaders transform, by model; everything else is copied.
TRANSFORMED = {
    "mamba2": {"backbone.layers.0.mixer.A_log", "backbone.layers.1.mixer.A_log"},
    "phi": {"lm_head.bias"},
}


pytestmark = pytest.mark.usefixtures("in_process")


@pytest.mark.case("C31", "C32", "C33", "C51", "C63", "C65", "C91")
@pytest.mark.parametrize("key", [*FAST, *(pytest.param(key, marks=pytest.mark.slow) for key in SLOW)])
def test_a_push_by_plan_is_bit_exact_and_runs_no_loader(key: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = read(checkpoint(key, 1, root)), read(checkpoint(key, 2, root))
    with engine(checkpoint(key, 1, root)) as live:
        cold_a = snapshot(live)
        push(live, b, planned=False)
        loaded_b = snapshot(live)
        assert cold_a.differing(loaded_b) != []
        push(live, a, planned=False)
        plan = planner(live).admit(specs(a))
        assert snapshot(live).differing(cold_a) == []
        assert plan.complete
        assert plan.via_loader == TRANSFORMED.get(key, set())
        assert plan.programs.keys() | plan.via_loader == dict(a).keys()
        handed: list[str] = []
        load_weights: Callable[..., Any] = live.model.load_weights

        def counting(weights: Any) -> Any:
            return load_weights((handed.append(name) or (name, tensor)) for name, tensor in weights)

        monkeypatch.setitem(live.model.__dict__, "load_weights", counting)
        for wanted, tensors in ((loaded_b, b), (cold_a, a), (cold_a, a)):
            handed.clear()
            ways = push_by(live, plan, tensors)
            assert set(handed) == plan.via_loader
            assert {"l" if name in plan.via_loader else "copied" for name, _ in tensors} == {
                "l" if way == "l" else "copied" for way in ways
            }
            found = snapshot(live)
            assert found.differing(wanted) == []
            assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)


def packed(tensors: Tensors, experts: int = 4) -> Tensors:
    """Write all experts of a layer as the two tensors that newer checkpoints have."""
    given = dict(tensors)
    prefixes = {name.partition(".experts.")[0] for name in given if ".experts." in name}
    result = {name: tensor for name, tensor in given.items() if ".experts." not in name}
    for prefix in prefixes:

        def stacked(kind: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([given[f"{prefix}.experts.{number}.{kind}.weight"] for number in range(experts)])

        result[f"{prefix}.experts.gate_up_proj"] = torch.cat([stacked("gate_proj"), stacked("up_proj")], dim=1)
        result[f"{prefix}.experts.down_proj"] = stacked("down_proj")
    return sorted(result.items())


def fused(tensors: Tensors) -> Tensors:
    """Write q, k and v, and gate and up, as one tensor each."""
    result = dict(tensors)
    for name in dict(tensors):
        if name.endswith("q_proj.weight"):
            parts = [result.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            result[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif name.endswith("gate_proj.weight") and ".experts." not in name:
            parts = [result.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
            result[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
    return sorted(result.items())


def refused(plans: Planner, tensors: Tensors) -> list[tuple[str, str]]:
    with pytest.raises(WeightPushError) as caught:
        plans.admit(specs(tensors))
    assert caught.value.code is ErrorCode.MANIFEST_REJECTED
    problems = [(problem["kind"], problem["name"]) for problem in caught.value.details["problems"]]
    assert all(name in caught.value.message for _, name in problems)
    return problems


def without(tensors: Tensors, *names: str) -> Tensors:
    return [(name, tensor) for name, tensor in tensors if name not in names]


@pytest.mark.case("C10", "C23", "C41", "C55", "C56", "C83")
def test_layouts_of_one_checkpoint_that_the_loaders_know(root: Path) -> None:
    a, b = read(checkpoint("qwen3_moe", 1, root)), read(checkpoint("qwen3_moe", 2, root))
    experts = len({name.split(".experts.")[1].split(".")[0] for name, _ in a if ".experts." in name})
    with engine(checkpoint("qwen3_moe", 1, root)) as live:
        cold_a = snapshot(live)
        push(live, b, planned=False)
        loaded_b = snapshot(live)
        plans = planner(live)
        for number, layout in enumerate((lambda t: packed(t, experts), fused, lambda t: packed(fused(t), experts))):
            for wanted, tensors in ((cold_a, layout(a)), (loaded_b, layout(b))):
                push_by(live, plans.admit(specs(tensors)), tensors)
                assert snapshot(live).differing(wanted) == [], number
        before = snapshot(live)
        _refuses_by_name(plans, packed(a, experts), fused(a), a)
        assert snapshot(live).differing(before) == []
        assert (before.tokens, before.logprobs) == (loaded_b.tokens, loaded_b.logprobs)


def _refuses_by_name(plans: Planner, packed_a: Tensors, fused_a: Tensors, a: Tensors) -> None:
    query = "model.layers.0.self_attn.q_proj.weight"
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    down = "model.layers.1.mlp.experts.down_proj"
    # Missing, in the checkpoint's own layout and in others: named as the checkpoint names it.
    assert refused(plans, without(a, query)) == [("missing", query)]
    assert refused(plans, without(packed_a, query)) == [("missing", query)]
    assert refused(plans, without(fused_a, qkv)) == [
        ("missing", query.replace("q_proj", part)) for part in ("k_proj", "q_proj", "v_proj")
    ]
    lacking = refused(plans, without(packed_a, down))
    assert {kind for kind, _ in lacking} == {"missing"}
    assert {name for _, name in lacking} == {
        name for name, _ in a if name.startswith("model.layers.1.mlp.experts.") and "down_proj" in name
    }
    # An expert less in a packed tensor.
    short = [(name, tensor[:-1] if name == down else tensor) for name, tensor in packed_a]
    assert {kind for kind, _ in refused(plans, short)} == {"missing"}
    # The same bytes twice.
    both = sorted([*without(fused_a), *[pair for pair in a if pair[0] == query]])
    assert (("duplicate", qkv)) in refused(plans, both)
    # Another shape, and a name that nobody knows, beside a layout that is known.
    wrong = [(name, torch.cat([tensor, tensor], 1) if name == down else tensor) for name, tensor in packed_a]
    assert ("wrong_shape", down) in refused(plans, wrong)
    extra = sorted([*packed_a, ("model.layers.0.mlp.surprise", torch.ones(2))])
    assert ("unknown", "model.layers.0.mlp.surprise") in refused(plans, extra)
    single = [(name, tensor.float() if name == down else tensor) for name, tensor in packed_a]
    assert refused(plans, single) == [("wrong_dtype", down)]


def test_dummy_weights_with_a_checkpoint_learn_at_start_what_a_push_must_write(root: Path) -> None:
    a = read(checkpoint("qwen2", 1, root))
    with engine(checkpoint("qwen2", 1, root)) as started:
        cold = snapshot(started)
    with engine(checkpoint("qwen2", 2, root), inner_format="dummy") as live:
        generate(live)
        plans = planner(live)
        plan = plans.prepare()
        assert plan is not None
        assert plan.complete
        layout = find_layout(live.model)
        assert layout is not None
        bias = "model.layers.0.self_attn.q_proj.bias"
        assert refused(plans, without(a, bias)) == [("missing", bias)]
        push_by(live, plans.admit(specs(a)), a)
        assert snapshot(live).differing(cold) == []


@pytest.mark.case("C39")
def test_dummy_weights_without_a_checkpoint_take_whatever_covers_every_parameter(root: Path, tmp_path: Path) -> None:
    directory = tmp_path / "bare"
    shutil.copytree(checkpoint("qwen3", 1, root), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    a, b = read(checkpoint("qwen3", 1, root)), read(checkpoint("qwen3", 2, root))
    norm, query = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    with engine(checkpoint("qwen3", 1, root)) as started:
        cold = snapshot(started)
    with engine(directory, inner_format="dummy") as live:
        generate(live)
        plans = planner(live)
        assert plans.prepare() is None
        before = snapshot(live)
        assert refused(plans, without(a, norm)) == [("missing", norm)]
        assert refused(plans, without(a, query)) == [("missing", "model.layers.0.self_attn.qkv_proj.weight")]
        assert refused(plans, []) == [("empty_manifest", "")]
        assert refused(plans, [*a, a[0]])[0][0] == "duplicate"
        whole = [(name, tensor.to(torch.int8) if name == norm else tensor) for name, tensor in a]
        assert refused(plans, whole) == [("wrong_dtype", norm)]
        assert snapshot(live).differing(before) == []
        with pytest.raises(WeightPushError) as unknown:
            check_reloadable(live.model, live.vllm_config)
        assert unknown.value.code is ErrorCode.LAYOUT_UNKNOWN
        for tensors in (b, a):
            push_by(live, plans.admit(specs(tensors)), tensors)
        assert snapshot(live).differing(cold) == []
        layout = find_layout(live.model)
        assert layout is not None
        assert layout.checkpoint is not None
        assert {spec.name for spec in layout.checkpoint} == dict(a).keys()
        # From now on it is a model like any other.
        assert refused(plans, without(a, query)) == [("missing", query)]


@pytest.mark.case("C4", "C42")
def test_a_loader_that_raises_while_planning_leaves_the_model_serving(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = read(checkpoint("llama_tied", 1, root)), read(checkpoint("llama_tied", 2, root))
    with engine(checkpoint("llama_tied", 1, root)) as live:
        before = snapshot(live)
        objects = {name: tensor for name, tensor in live.model.named_parameters(remove_duplicate=False)}
        load = AutoWeightsLoader.load_weights

        def half(self: Any, weights: Any, **options: Any) -> Any:
            kept = list(weights)
            load(self, iter(kept[: len(kept) // 2]), **options)
            raise OSError("the loader stopped half way")

        with monkeypatch.context() as patch:
            patch.setattr(AutoWeightsLoader, "load_weights", half)
            plan = planner(live).plan(specs(a))
        assert plan.programs == {}
        assert snapshot(live).differing(before) == []
        assert all(tensor is objects[name] for name, tensor in live.model.named_parameters(remove_duplicate=False))
        assert generate(live) == (before.tokens, before.logprobs)
        # Such a plan knows nothing, and the loaders land everything.
        assert push_by(live, plan, b) == "l" * len(b)
        push(live, a)
        assert snapshot(live).differing(before) == []


def pushed(server: ServerProcess, tensors: Tensors, version: str) -> dict[str, int]:
    """Push over HTTP and return the plan that ``begin`` answered."""
    update = RawUpdate(server, dict(tensors), version=version)
    begun = update.begin()
    begun.raise_for_status()
    update.stream_all()
    update.finish().raise_for_status()
    plan: dict[str, int] = begun.json()["plan"]
    return plan


@pytest.mark.case("C55")
def test_begin_answers_how_tensors_land_and_takes_a_fused_layout(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str], cold_b: dict[str, str]
) -> None:
    a, b = sorted(read_tensors(checkpoints.a).items()), sorted(read_tensors(checkpoints.b).items())
    nbytes = sum(tensor.nbytes for _, tensor in b)
    plan = pushed(server, b, "B")
    assert plan == {"in_place": 11, "scratch": 14, "via_loader": 0, "ignored": 0, "bytes": nbytes}
    separate = server.status()["fingerprint"]
    plan = pushed(server, fused(b), "B-fused")
    # Of qkv and gate_up of two layers there is one each now.
    assert plan == {"in_place": 11, "scratch": 8, "via_loader": 0, "ignored": 0, "bytes": nbytes}
    assert server.status()["fingerprint"] == separate
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b
    pushed(server, a, "A")
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_a


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("C72")
def test_under_tensor_parallelism_each_rank_has_a_plan_of_its_own(root: Path, tmp_path: Path) -> None:
    a, b = read(checkpoint("qwen3_moe", 1, root)), read(checkpoint("qwen3_moe", 2, root))
    query = "model.layers.0.self_attn.q_proj.weight"
    with ServerProcess(
        checkpoint("qwen3_moe", 1, root),
        ["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        folder=tmp_path,
        executor="mp",
    ) as server:
        cold = {prompt: server.answer(prompt) for prompt in PROMPTS}
        fingerprint = server.status()["fingerprint"]
        refusal = error_of(RawUpdate(server, dict(without(b, query)), version="bad").begin())
        assert [(problem["kind"], problem["name"]) for problem in refusal["details"]["problems"]] == [
            ("missing", query)
        ]
        plan = pushed(server, b, "B")
        assert plan["in_place"] + plan["scratch"] == len(b)
        other = server.status()["fingerprint"]
        assert other != fingerprint
        experts = len({name.split(".experts.")[1].split(".")[0] for name, _ in b if ".experts." in name})
        pushed(server, packed(b, experts), "B-packed")
        assert server.status()["fingerprint"] == other
        pushed(server, a, "A")
        assert server.status()["fingerprint"] == fingerprint
        assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold
