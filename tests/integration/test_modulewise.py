"""Modules that are processed while the rest still lands: which, when, and that the model is that of a cold start."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from support.engine import CPU, Engine, Snapshot, Tensors, engine, land, push, read, snapshot, specs
from support.tiny import checkpoint
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.config import StoragePolicy
from weightpush_server.reload import ReloadSession, finish_reload, start_reload
from weightpush_server.reload.journal import AttributeJournal
from weightpush_server.reload.layout import ModelLayout, find_layout
from weightpush_server.reload.modulewise import Units, find_units
from weightpush_server.reload.plan import Plan, make_plan

MODELS = ("qwen3", "qwen3_moe", "deepseek_v2")


pytestmark = pytest.mark.usefixtures("in_process")


def plan_of(live: Engine, tensors: Tensors) -> Plan:
    layout = find_layout(live.model)
    assert layout is not None
    return make_plan(live.model, layout, specs(tensors), vllm_config=live.vllm_config, device=CPU)


def begin(live: Engine, plan: Plan) -> ReloadSession:
    return start_reload(live.model, vllm_config=live.vllm_config, device=CPU, poison=True, plan=plan)


def closed(session: ReloadSession) -> set[str]:
    return {unit.path for unit in session.closer.closed}


def processed(live: Engine, kinds: tuple[type, ...] = (LinearBase, RoutedExperts)) -> set[str]:
    """Name the modules of these kinds whose weight processing moves somewhere else."""
    return {
        path
        for path, module in live.model.named_modules()
        if isinstance(module, kinds) and not getattr(module, "_cpu_skip_gemm_dispatch", False)
    }


def written_by(live: Engine, plan: Plan, name: str) -> set[str]:
    """Name the modules that a tensor lands in."""
    layout = find_layout(live.model)
    assert layout is not None
    groups = [layout.groups[index] for index in plan.groups_of(name)]
    return {slot.path for group in groups for member in group.members for slot in member.slots}


def scratch(live: Engine, session: ReloadSession, paths: set[str]) -> int:
    """Count the storage groups of the modules ``paths`` that lie on scratch storage now."""
    layout = find_layout(live.model)
    assert layout is not None
    return sum(
        session.opened.is_scratch(group) and group.storage.alive
        for group in layout.groups
        if group.name.rpartition(".")[0] in paths
    )


@pytest.mark.case("C29", "C31", "C33", "C40")
@pytest.mark.parametrize("key", MODELS)
def test_modules_close_as_their_weights_land_and_end_as_at_a_cold_start(
    key: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = read(checkpoint(key, 1, root)), read(checkpoint(key, 2, root))
    with engine(checkpoint(key, 2, root)) as started:
        cold = snapshot(started)
    with engine(checkpoint(key, 1, root)) as live:
        plan = plan_of(live, b)
        paths = processed(live)
        session = begin(live, plan)
        missing = {path: {name for name in plan.writes if path in written_by(live, plan, name)} for path in paths}
        for name, tensor in random.Random(3).sample(b, len(b)):
            land(session, [(name, tensor)])
            for names in missing.values():
                names.discard(name)
            # Exactly those that miss nothing; what is packed away holds no scratch storage any more.
            assert closed(session) == {path for path, names in missing.items() if not names}
            assert scratch(live, session, {path for path in closed(session) if "experts" not in path}) == 0
        assert closed(session) == paths
        assert not paths & processed(live, (VocabParallelEmbedding,))
        proof = finish_reload(session)
        assert proof.seconds_postload > proof.seconds_early > 0
        assert snapshot(live).differing(cold) == []
        push(live, a)
        with monkeypatch.context() as patch:
            patch.setattr("weightpush_server.reload.modulewise.find_units", lambda layout, plan: Units())
            whole = push(live, b)
        assert (whole.fingerprint, whole.seconds_early) == (proof.fingerprint, 0)
        assert snapshot(live).differing(cold) == []


@pytest.mark.case("C31", "C40")
def test_modules_close_between_the_parts_of_a_large_bucket(
    live: Engine, b: Tensors, cold: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the scratch storage of all modules of a bucket would be there at the same time."""
    monkeypatch.setattr("weightpush_server.reload.batch._MOST_BYTES", 3000)
    session = begin(live, plan_of(live, b))
    landed: list[int] = []
    close, count = session.closer._close, len(b)

    def note(unit: Any) -> None:
        landed.append(len(session.landed))
        assert scratch(live, session, processed(live)) <= 4
        close(unit)

    monkeypatch.setattr(session.closer, "_close", note)
    land(session, b)
    assert closed(session) == processed(live)
    assert landed == sorted(landed)
    assert len(set(landed)) > 1
    assert landed[0] < count / 2
    finish_reload(session)
    assert snapshot(live).differing(cold) == []


@pytest.fixture(scope="module")
def cold(root: Path) -> Snapshot:
    with engine(checkpoint("qwen3_moe", 2, root)) as started:
        return snapshot(started)


@pytest.fixture(scope="module")
def live(root: Path, cold: Snapshot) -> Iterator[Engine]:
    """An engine for the tests below, each of which ends with a complete push of its own."""
    with engine(checkpoint("qwen3_moe", 1, root)) as started:
        yield started


@pytest.fixture
def b(root: Path) -> Tensors:
    return read(checkpoint("qwen3_moe", 2, root))


@pytest.mark.case("C4", "C42")
@pytest.mark.parametrize("planned", [True, False], ids=["plan", "loaders"])
def test_a_push_that_ends_with_some_modules_closed_is_repaired_by_the_next(
    planned: bool, live: Engine, b: Tensors, cold: Snapshot
) -> None:
    session = begin(live, plan_of(live, b))
    land(session, b[: len(b) // 2])
    assert 0 < len(closed(session)) < len(processed(live))
    with pytest.raises(WeightPushError, match="never arrived"):
        finish_reload(session)
    push(live, b, planned=planned)
    assert snapshot(live).differing(cold) == []


@pytest.mark.case("C4", "C38")
def test_processing_that_fails_while_others_land_names_the_module_and_is_repaired(
    live: Engine, b: Tensors, cold: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(layer: Any) -> None:
        raise MemoryError("no room to pack")

    session = begin(live, plan_of(live, b))
    with monkeypatch.context() as patch:
        patch.setattr(live.model.model.layers[1].self_attn.qkv_proj.quant_method, "process_weights_after_loading", fail)
        with pytest.raises(WeightPushError, match="no room to pack") as caught:
            land(session, b)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["module"] == "model.layers.1.self_attn.qkv_proj"
    for step in (lambda: land(session, b[:1]), lambda: finish_reload(session)):
        with pytest.raises(WeightPushError, match="no room to pack"):
            step()
    push(live, b)
    assert snapshot(live).differing(cold) == []


@pytest.mark.case("C40")
def test_a_weight_that_was_exchanged_while_it_landed_is_not_processed(live: Engine, b: Tensors, cold: Snapshot) -> None:
    path, last = "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.v_proj.weight"
    module: Any = live.model.get_submodule(path)
    session = begin(live, plan_of(live, b))
    land(session, [(name, tensor) for name, tensor in b if name != last])
    module.weight = torch.nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
    with pytest.raises(WeightPushError, match="took its place") as caught:
        land(session, [(name, tensor) for name, tensor in b if name == last])
    assert caught.value.details["tensor"] == f"{path}.weight"
    assert path not in closed(session)
    push(live, b)
    assert snapshot(live).differing(cold) == []


def test_a_tensor_for_a_closed_module_is_refused(live: Engine, b: Tensors, cold: Snapshot) -> None:
    session = begin(live, plan_of(live, b))
    land(session, b[: len(b) // 2])
    before = closed(session)
    with pytest.raises(WeightPushError, match="arrived twice"):
        land(session, b[len(b) // 2 - 1 : len(b) // 2])
    assert closed(session) == before
    push(live, b)
    assert snapshot(live).differing(cold) == []


SPOILT: dict[str, Callable[[ModelLayout, Plan], tuple[ModelLayout, Plan]]] = {
    "a method": lambda layout, plan: (
        replace(layout, quant_methods=[*layout.quant_methods, ("x", torch.nn.Module(), type)]),
        plan,
    ),
    "retained storage": lambda layout, plan: (replace(layout, policy=StoragePolicy.RETAIN), plan),
    "pinned addresses": lambda layout, plan: (replace(layout, pin_devices=frozenset({"cpu"})), plan),
    "a changed list": lambda layout, plan: (replace(layout, journal=_with_a_list(layout.journal)), plan),
    "a loader": lambda layout, plan: (layout, replace(plan, via_loader=frozenset({"x"}))),
    "an incomplete plan": lambda layout, plan: (layout, replace(plan, complete=False)),
}


def _with_a_list(journal: AttributeJournal) -> AttributeJournal:
    other = copy.copy(journal)
    other._contents = [([1], [])]
    return other


@pytest.mark.parametrize("what", SPOILT)
def test_one_thing_that_nobody_can_vouch_for_keeps_the_whole_model_for_the_end(
    what: str, live: Engine, b: Tensors
) -> None:
    layout, plan = find_layout(live.model), plan_of(live, b)
    assert layout is not None
    assert len(find_units(layout, plan).all) == len(processed(live))
    assert find_units(*SPOILT[what](layout, plan)).all == ()


def test_modules_that_share_a_weight_wait_for_the_end(live: Engine, b: Tensors) -> None:
    layout, plan = find_layout(live.model), plan_of(live, b)
    assert layout is not None
    everything = find_units(layout, plan).all
    first, second = everything[:2]
    member = layout.groups[first.groups[0]].members[0]
    member.slots.append(layout.groups[second.groups[0]].members[0].slots[0])
    try:
        assert find_units(layout, plan).all == everything[2:]
    finally:
        member.slots.pop()


def test_a_partial_update_closes_modules_as_well(live: Engine, b: Tensors, cold: Snapshot) -> None:
    push(live, b)
    kept = {name for name, _ in b if "norm" in name}
    proof = push(live, [(name, tensor) for name, tensor in b if name not in kept], partial=True)
    assert proof.seconds_postload > proof.seconds_early > 0
    assert snapshot(live).differing(cold) == []
