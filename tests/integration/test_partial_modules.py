"""Partial updates process only the modules that they touch, and leave a model as a cold start on the mix would."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from support.engine import Engine, Tensors, engine, planner, push, read, snapshot, specs
from support.tiny import checkpoint
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload import finish_reload, start_reload
from weightpush_server.reload.fingerprint import fingerprint
from weightpush_server.reload.layout import ModelLayout, find_layout
from weightpush_server.reload.modulewise import find_units
from weightpush_server.reload.plan import Plan
from weightpush_server.verify import ServedModel

METHODS: tuple[Any, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


pytestmark = pytest.mark.usefixtures("in_process")


def layout_of(live: Engine) -> ModelLayout:
    layout = find_layout(live.model)
    assert layout is not None
    return layout


def admit(live: Engine, tensors: Tensors) -> Plan:
    """Ask as a worker does at ``begin``."""
    return planner(live).admit(specs(tensors), partial=True)


def modules_of(live: Engine, plan: Plan) -> dict[str, set[str]]:
    """Return the tensors that land in each module, by its path."""
    found: dict[str, set[str]] = {}
    for name in plan.writes:
        for index in plan.groups_of(name):
            for member in layout_of(live).groups[index].members:
                for slot in member.slots:
                    found.setdefault(slot.path, set()).add(name)
    return found


@contextmanager
def processed(live: Engine) -> Iterator[set[str]]:
    """Collect the paths of the modules whose methods process them."""
    paths = {id(module): path for path, module in live.model.named_modules()}
    seen: set[str] = set()

    def watched(original: Any) -> Any:
        def process(self: Any, layer: Any) -> None:
            seen.add(paths[id(layer)])
            original(self, layer)

        return process

    with pytest.MonkeyPatch.context() as patch:
        for method in METHODS:
            patch.setattr(method, "process_weights_after_loading", watched(method.process_weights_after_loading))
        yield seen


def mixed(like: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(like, to)
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(content, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.case("C33", "C57")
@pytest.mark.parametrize(
    ("key", "policy"),
    [*((key, "scratch") for key in ("qwen2", "llama_tied", "qwen3_moe", "deepseek_v2")), ("qwen3_moe", "retain")],
)
def test_only_what_a_partial_push_touches_is_processed_and_all_is_as_at_a_cold_start(
    key: str, policy: str, root: Path, tmp_path: Path
) -> None:
    a, b = read(checkpoint(key, 1, root)), dict(read(checkpoint(key, 2, root)))
    expected, chance = dict(a), random.Random(5)
    with engine(checkpoint(key, 1, root), policy=policy) as live:
        groups = layout_of(live).groups
        tensors_of = modules_of(live, planner(live).plan(specs(a)))
        embeddings = {path for path in tensors_of if path.endswith(("embed_tokens", "lm_head"))}
        with_methods = {path for path, _, _ in layout_of(live).quant_methods}
        for turn in range(3):
            # Whole modules, some with and some without weights that are packed; in the last turn the embedding, too.
            chosen = set(chance.sample(sorted(tensors_of.keys() - embeddings), 4)) | (
                embeddings if turn == 2 else set()
            )
            sent = {name: b[name] for path in sorted(chosen) for name in tensors_of[path]}
            touched = {path for path, names in tensors_of.items() if names & sent.keys()}
            addresses = {
                group.name: tensor.data_ptr()
                for group in groups
                for tensor in group.registered()
                if tensor is not None and tensor.numel() and group.name.rpartition(".")[0] not in touched
            }
            admit(live, list(sent.items()))
            with processed(live) as seen:
                push(live, list(sent.items()), cuts=[list(sent.items())[::2], list(sent.items())[1::2]], partial=True)
            assert seen == (touched & with_methods)
            expected.update(sent)
            for group in groups:
                if group.name in addresses:
                    (tensor,) = {tensor for tensor in group.registered() if tensor is not None}
                    assert tensor.data_ptr() == addresses[group.name]
        found = snapshot(live)
        everything = mixed(checkpoint(key, 1, root), tmp_path / "mixed", expected)
        with processed(live) as seen:
            push(live, sorted(b.items()))
        assert seen == with_methods
        whole = fingerprint(live.model)
    with engine(everything) as started:
        wanted = snapshot(started)
        assert wanted.differing(found) == []
        assert (wanted.tokens, wanted.logprobs) == (found.tokens, found.logprobs)
        push(started, sorted(b.items()))
        assert fingerprint(started.model) == whole


QKV = tuple(f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv")
EXPERTS = "model.layers.1.mlp.experts"
GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[Engine]:
    """An engine for the tests below, each of which ends with a complete push of its own."""
    with engine(checkpoint("qwen3_moe", 1, root)) as started:
        yield started


@pytest.fixture
def b(root: Path) -> dict[str, torch.Tensor]:
    return dict(read(checkpoint("qwen3_moe", 2, root)))


def part(b: dict[str, torch.Tensor], *names: str) -> Tensors:
    return [(name, b[name]) for name in names]


def refused(live: Engine, tensors: Tensors) -> str:
    """Return the weight that ``begin`` says is gone."""
    with pytest.raises(WeightPushError, match="cannot leave out") as caught:
        admit(live, tensors)
    assert caught.value.code is ErrorCode.PARTIAL_REFUSED
    return str(caught.value.details["tensor"])


@pytest.mark.case("C57")
def test_a_part_of_a_packed_module_is_refused_and_named(live: Engine, b: dict[str, torch.Tensor]) -> None:
    before = fingerprint(live.model)
    assert refused(live, part(b, QKV[0], "model.norm.weight")) == "model.layers.0.self_attn.qkv_proj.weight"
    assert refused(live, part(b, f"{EXPERTS}.0.down_proj.weight")).startswith(EXPERTS)
    assert fingerprint(live.model) == before


@pytest.mark.case("C42", "C57")
def test_after_a_failed_push_only_modules_that_it_left_alone_may_be_left_out(
    live: Engine, b: dict[str, torch.Tensor]
) -> None:
    push(live, sorted(b.items()))
    before = fingerprint(live.model)
    plan = admit(live, part(b, *QKV))
    start_reload(live.model, vllm_config=live.vllm_config, device=torch.device("cpu"), partial=True, plan=plan)
    # Given up before a byte has come. What it did not open still is what was committed.
    assert refused(live, part(b, GATE)) == "model.layers.0.self_attn.qkv_proj.weight"
    admit(live, part(b, *QKV, GATE))
    push(live, part(b, *QKV, GATE), partial=True)
    assert fingerprint(live.model) == before
    start_reload(live.model, vllm_config=live.vllm_config, device=torch.device("cpu"), plan=planner(live).plan(()))
    assert refused(live, part(b, *QKV, GATE)) != ""
    push(live, sorted(b.items()))
    assert fingerprint(live.model) == before


@pytest.mark.case("C40")
@pytest.mark.parametrize("what", ["its linear", "its weight", "a kernel"])
def test_a_module_that_somebody_else_processed_is_not_left_alone(
    what: str, live: Engine, b: dict[str, torch.Tensor]
) -> None:
    push(live, sorted(b.items()))
    admit(live, part(b, GATE))
    qkv: Any = live.model.get_submodule("model.layers.0.self_attn.qkv_proj")
    experts: Any = live.model.get_submodule("model.layers.0.mlp.experts.routed_experts")
    if what == "its linear":
        qkv.cpu_linear = torch.nn.functional.linear
    elif what == "its weight":
        qkv.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    else:
        experts.quant_method.moe_kernel = object()
    assert ("experts" if what == "a kernel" else "qkv_proj") in refused(live, part(b, GATE))
    # Begun without being asked, as no worker would: the proof holds by itself.
    plan = planner(live).plan(specs(part(b, GATE)))
    session = start_reload(
        live.model, vllm_config=live.vllm_config, device=torch.device("cpu"), partial=True, plan=plan
    )
    session.land(part(b, GATE))
    with pytest.raises(WeightPushError, match="not all of it was written"):
        finish_reload(session)
    push(live, sorted(b.items()))
    admit(live, part(b, GATE))


@pytest.mark.case("C40")
def test_what_was_written_into_a_module_that_is_left_alone_is_found_before_the_commit(
    live: Engine, b: dict[str, torch.Tensor]
) -> None:
    push(live, sorted(b.items()))
    served = ServedModel(live.model)
    experts: Any = live.model.get_submodule("model.layers.0.mlp.experts.routed_experts")
    plan = admit(live, part(b, GATE))
    session = start_reload(
        live.model, vllm_config=live.vllm_config, device=torch.device("cpu"), partial=True, plan=plan
    )
    session.land(part(b, GATE))
    kept = [unit.path for unit in session.untouched]
    proof = finish_reload(session)
    served.check_untouched(proof.prints, kept)
    with torch.no_grad():
        experts.w13_weight.view(torch.uint8).view(-1)[0] ^= 1
    admit(live, part(b, GATE))  # The objects are the same; only their contents tell.
    proof = push(live, part(b, GATE), partial=True)
    with pytest.raises(WeightPushError, match="left it alone") as caught:
        served.check_untouched(proof.prints, kept)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["tensor"].startswith("model.layers.0.mlp.experts")
    served.check_untouched(proof.prints, [path for path in kept if "experts" not in path])
    push(live, sorted(b.items()))


def test_one_thing_that_nobody_can_vouch_for_has_every_module_processed(
    live: Engine, b: dict[str, torch.Tensor]
) -> None:
    push(live, sorted(b.items()))
    layout, plan = layout_of(live), planner(live).plan(specs(part(b, GATE)))
    alone = find_units(layout, plan).untouched
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.qkv_proj"} < {unit.path for unit in alone}
    spoilt = [
        (replace(layout, quant_methods=[*layout.quant_methods, ("x", torch.nn.Module(), type)]), plan),
        (replace(layout, has_hook=True), plan),
        (layout, replace(plan, via_loader=frozenset({"x"}))),
        (layout, replace(plan, refused={"x": "no such weight"})),
        (layout, replace(plan, complete=False)),
    ]
    for given in spoilt:
        assert find_units(*given).untouched == ()


def test_modules_that_share_a_method_are_not_units(live: Engine, b: dict[str, torch.Tensor]) -> None:
    push(live, sorted(b.items()))
    layout, plan = layout_of(live), planner(live).plan(specs(part(b, GATE)))
    first, second = (live.model.get_submodule(f"model.layers.{number}.self_attn.qkv_proj") for number in (0, 1))
    before: Any = first.quant_method
    first.quant_method = second.quant_method
    try:
        paths = {unit.path for unit in find_units(layout, plan).untouched}
        assert not any("qkv_proj" in path for path in paths)
        assert "model.layers.0.self_attn.o_proj" in paths
    finally:
        first.quant_method = before


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_touched_embedding_has_its_head_processed_and_the_other_way_round(
    name: str, live: Engine, b: dict[str, torch.Tensor]
) -> None:
    push(live, sorted(b.items()))
    with processed(live) as seen:
        push(live, part(b, name), partial=True)
    assert seen == {"lm_head", "model.embed_tokens"}
