"""Storage policies, partial pushes and the self-check, on real models and on a real server."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support.engine import CPU, Engine, Tensors, engine, generate, push, read, snapshot
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_client import PushError, WeightPusher
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.reload import Planner, check_reloadable
from weightpush_server.reload.fingerprint import fingerprint
from weightpush_server.reload.layout import ModelLayout, SelfCheckOutcome, find_layout


def _layout(live: Engine) -> ModelLayout:
    layout = find_layout(live.model)
    assert layout is not None
    return layout


def _admit(live: Engine, tensors: Tensors) -> None:
    """Ask as a worker does at ``begin``."""
    planner = Planner(live.model, _layout(live), vllm_config=live.vllm_config, device=CPU)
    planner.admit([TensorSpec.of(name, tensor) for name, tensor in tensors], partial=True)


def _checkpoint_of(like: Path, to: Path, tensors: Tensors) -> Path:
    shutil.copytree(like, to)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.case("C33", "C57")
@pytest.mark.parametrize("key", ["llama_tied", "qwen3_moe"])
@pytest.mark.usefixtures("in_process")
def test_any_part_can_be_pushed_under_retain(key: str, root: Path, tmp_path: Path) -> None:
    a, b = read(checkpoint(key, 1, root)), read(checkpoint(key, 2, root))
    chance = random.Random(3)
    subsets = [chance.sample(b, count) for count in (1, 1, 3, len(b) // 2)]
    expected = dict(a)
    with engine(checkpoint(key, 1, root), policy="retain") as live:
        assert _layout(live).self_check.outcome is SelfCheckOutcome.PASSED
        for subset in subsets:
            _admit(live, subset)
            push(live, subset, cuts=[subset[::2], subset[1::2]], partial=True)
            expected.update(subset)
        found = snapshot(live)
        mixed = _checkpoint_of(checkpoint(key, 1, root), tmp_path / "mixed", sorted(expected.items()))
        push(live, b)
        whole = fingerprint(live.model)
    with engine(mixed) as started:
        wanted = snapshot(started)
        assert wanted.differing(found) == []
        assert (wanted.tokens, wanted.logprobs) == (found.tokens, found.logprobs)
        push(started, b)
        assert fingerprint(started.model) == whole


@pytest.mark.usefixtures("in_process")
def test_under_scratch_no_part_of_a_packed_module_may_be_left_out(root: Path, tmp_path: Path) -> None:
    a, b = read(checkpoint("qwen3", 1, root)), read(checkpoint("qwen3", 2, root))
    # On a CPU every linear layer is packed away; norms are not.
    sent = [(name, tensor) for name, tensor in b if "norm" not in name]
    with engine(checkpoint("qwen3", 1, root)) as live:
        before = fingerprint(live.model)
        for left_out in ("model.layers.1.mlp.gate_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            with pytest.raises(WeightPushError, match="storage-policy retain") as caught:
                _admit(live, [pair for pair in b if pair[0] != left_out])
            assert caught.value.code is ErrorCode.PARTIAL_REFUSED
        assert fingerprint(live.model) == before
        _admit(live, sent)
        push(live, sent, partial=True)
        found = snapshot(live)
    mixed = _checkpoint_of(checkpoint("qwen3", 1, root), tmp_path / "mixed", sorted({**dict(a), **dict(sent)}.items()))
    with engine(mixed) as started:
        assert snapshot(started).differing(found) == []


@pytest.mark.usefixtures("in_process")
def test_strict_refuses_packed_layers(root: Path) -> None:
    with engine(checkpoint("qwen3", 1, root), policy="strict") as live, pytest.raises(WeightPushError) as caught:
        check_reloadable(live.model, live.vllm_config)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert caught.value.details["offender"].endswith("qkv_proj.weight")


@pytest.mark.case("C31", "C51")
@pytest.mark.usefixtures("in_process")
def test_a_guard_that_nobody_knows_is_found_at_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's experts are prepacked once a kernel: here the kernels live where no journal looks."""
    process = UnquantizedFusedMoEMethod.process_weights_after_loading
    done: set[str] = set()

    def once(self: Any, layer: Any) -> None:
        if layer.layer_name not in done:
            done.add(layer.layer_name)
            process(self, layer)

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", once)
    forget = done.clear
    # Loading anew is a cold start: vLLM makes new layers then.
    monkeypatch.setattr("weightpush_server.loader._LayerRegistry.restore", _then(forget))
    with engine(checkpoint("qwen3_moe", 1, root)) as live:
        check = _layout(live).self_check
        assert check.outcome is SelfCheckOutcome.FAILED
        assert "experts" in check.offender
        with pytest.raises(WeightPushError, match="experts") as caught:
            check_reloadable(live.model, live.vllm_config)
        assert caught.value.code is ErrorCode.SELF_CHECK_FAILED
        found = generate(live)
    monkeypatch.undo()
    with engine(checkpoint("qwen3_moe", 1, root)) as started:
        assert generate(started) == found


def _then(action: Any) -> Any:
    from weightpush_server.loader import _LayerRegistry

    restore = _LayerRegistry.restore

    def both(self: Any) -> None:
        restore(self)
        action()

    return both


@pytest.mark.parametrize("policy", ["scratch", "retain"])
@pytest.mark.usefixtures("in_process")
def test_memory_is_given_back(policy: str, root: Path) -> None:
    """What a push takes is freed: nothing is left of it under scratch, one copy of what was packed under retain."""
    a, b = read(checkpoint("qwen3", 1, root)), read(checkpoint("qwen3", 2, root))
    with engine(checkpoint("qwen3", 1, root), policy=policy) as live:
        groups = _layout(live).groups
        packed = [group for group in groups if all(member.live() is None for member in group.members)]
        assert packed
        for tensors in (b, a, b):
            push(live, tensors)
            assert [group.name for group in packed if group.retained is None and group.storage.alive] == []
            kept = sum(group.nbytes for group in groups if group.retained is not None)
            assert (kept > 0) is (policy == "retain")
            assert kept <= sum(tensor.nbytes for _, tensor in b)
            assert torch.is_grad_enabled()


@pytest.mark.case("C33", "C57")
def test_a_partial_push_onto_a_real_server(checkpoints: Checkpoints, tmp_path: Path) -> None:
    a, b = dict(read(checkpoints.a)), dict(read(checkpoints.b))
    part = {name: b[name] for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight")}
    with (
        ServerProcess(checkpoints.a, ("--storage-policy", "retain"), folder=tmp_path, token=TOKEN) as server,
        WeightPusher(server.url, token=TOKEN) as pusher,
    ):
        (worker,) = server.status()["workers"]
        assert (worker["self_check"], worker["reload_refused"]) == ("passed", None)
        before = server.status()["fingerprint"]
        with pytest.raises(PushError) as caught:
            pusher.push(part, weight_version="incomplete")
        assert caught.value.code is ErrorCode.MANIFEST_REJECTED
        report = pusher.push(part, weight_version="part", partial=True)
        assert report.tensors == 2
        answers = [server.answer("weights"), server.answer("x")]
        whole = pusher.push({**a, **part}, weight_version="whole")
        assert whole.servers[0].fingerprint == report.servers[0].fingerprint != before
        assert [server.answer("weights"), server.answer("x")] == answers
        pusher.push(checkpoints.a, weight_version="back")
        assert server.status()["fingerprint"] == before


@pytest.mark.case("C57")
def test_a_partial_push_is_refused_where_the_rest_is_gone(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    b = dict(read(checkpoints.b))
    with WeightPusher(server.url, token=TOKEN, partial=True) as pusher:
        part = {name: b[name] for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight")}
        with pytest.raises(PushError, match="storage-policy retain") as caught:
            pusher.push(part, weight_version="part")
        assert caught.value.code is ErrorCode.PARTIAL_REFUSED
        with pytest.raises(PushError) as unknown:
            pusher.push({"model.nurm.weight": b["model.norm.weight"]}, weight_version="part")
        assert unknown.value.code is ErrorCode.MANIFEST_REJECTED
    assert server.status()["serving"]
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_a


@pytest.mark.case("C33", "C57")
def test_whole_modules_may_be_left_out_of_a_push_onto_any_server(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    a, b = dict(read(checkpoints.a)), dict(read(checkpoints.b))
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj", "input_layernorm")
    part = {f"model.layers.1.{name}.weight": b[f"model.layers.1.{name}.weight"] for name in names}
    for mode in ("direct", "staged"):
        with WeightPusher(server.url, token=TOKEN, mode=mode) as pusher:
            before = pusher.push(checkpoints.a, weight_version="a").servers[0].fingerprint
            report = pusher.push(part, weight_version="part", partial=True)
            answers = [server.answer(prompt) for prompt in PROMPTS]
            assert answers != list(cold_a.values())
            whole = pusher.push({**a, **part}, weight_version="whole")
            assert whole.servers[0].fingerprint == report.servers[0].fingerprint != before
            assert [server.answer(prompt) for prompt in PROMPTS] == answers
            pusher.push(checkpoints.a, weight_version="a")
            assert server.status()["fingerprint"] == before
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_a


@pytest.mark.slow
def test_a_server_that_can_take_no_update_says_so_and_serves(checkpoints: Checkpoints, tmp_path: Path) -> None:
    arguments = ("--storage-policy", "strict", "--no-self-check")
    with (
        ServerProcess(checkpoints.a, arguments, folder=tmp_path, token=TOKEN) as server,
        WeightPusher(server.url, token=TOKEN) as pusher,
    ):
        (worker,) = server.status()["workers"]
        assert worker["self_check"] == "off"
        assert worker["reload_refused"]["code"] == "storage_unavailable"
        with pytest.raises(PushError) as caught:
            pusher.push(checkpoints.b, weight_version="b")
        assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
        assert server.status()["serving"]
        assert server.answer("weights")
