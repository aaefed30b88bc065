"""A push onto a live model ends where a cold start on the same checkpoint ends: bit for bit, on eight architectures.

The oracle is a cold start: every tensor that the model can reach, the answers of its packed layers, greedy tokens and
logprobs. Engines run in this process, one after another.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader import get_model_loader

from support.engine import (
    CPU,
    Engine,
    Snapshot,
    Tensors,
    engine,
    generate,
    land,
    planner,
    probe_layers,
    push,
    read,
    snapshot,
)
from support.tiny import checkpoint
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload import ReloadSession, check_reloadable, finish_reload, start_reload
from weightpush_server.reload.contract import registered
from weightpush_server.reload.coverage import ByteRanges
from weightpush_server.reload.fingerprint import fingerprint, reachable_tensors
from weightpush_server.reload.layout import find_layout

MODELS = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_tied", "gemma3", "qwen3_moe", "mixtral")


pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(scope="module")
def cold(root: Path) -> Callable[[str, int], Snapshot]:
    """Return what a cold start on a tiny model's checkpoint looks like; each is started once."""
    seen: dict[tuple[str, int], Snapshot] = {}

    def look(key: str, seed: int) -> Snapshot:
        if (key, seed) not in seen:
            with engine(checkpoint(key, seed, root)) as started:
                seen[key, seed] = snapshot(started)
        return seen[key, seed]

    return look


@dataclass
class Row:
    """One line of the table: tensors of a cold start, and how many differ from it after a push."""

    tensors: int
    probes: int
    differ_b: int = 0
    differ_a: int = 0
    tokens: bool = True
    logprobs: bool = True

    def add(self, direction: str, found: Snapshot, wanted: Snapshot) -> list[str]:
        differing = found.differing(wanted)
        if direction == "b":
            self.differ_b = max(self.differ_b, len(differing))
        else:
            self.differ_a = max(self.differ_a, len(differing))
        self.tokens &= found.tokens == wanted.tokens
        self.logprobs &= found.logprobs == wanted.logprobs
        return differing


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, Row]]:
    """Collect a row for each model and print them at the end, whatever the options."""
    rows: dict[str, Row] = {}
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            "\n\n| model | tensors | packed layers | differ from a cold start after B / after A | tokens | logprobs |"
        )
        print("|---|---|---|---|---|---|")
        for key, row in rows.items():
            equal = [("equal" if same else "DIFFERENT") for same in (row.tokens, row.logprobs)]
            differ = f"{row.differ_b} / {row.differ_a}"
            print(f"| {key} | {row.tensors} | {row.probes} | {differ} | {equal[0]} | {equal[1]} |")


def _one_each(tensors: Tensors) -> list[Tensors]:
    return [[pair] for pair in tensors]


def _shuffled(tensors: Tensors, buckets: int) -> list[Tensors]:
    order = random.Random(0).sample(tensors, len(tensors))
    return [order[start::buckets] for start in range(buckets)]


@pytest.mark.case("C29", "C30", "C31", "C32", "C33", "C40", "C41", "C51", "C63", "C68")
@pytest.mark.parametrize("key", MODELS)
def test_push_equals_cold_start(
    key: str, root: Path, cold: Callable[[str, int], Snapshot], table: dict[str, Row]
) -> None:
    a, b = read(checkpoint(key, 1, root)), read(checkpoint(key, 2, root))
    cold_b = cold(key, 2)
    with engine(checkpoint(key, 1, root)) as live:
        cold_a = snapshot(live)
        assert all(mine != theirs for mine, theirs in zip(cold_a.tokens, cold_b.tokens, strict=True))
        assert len(cold_a.differing(cold_b)) > len(cold_a.probes)
        row = table[key] = Row(tensors=len(cold_a.tensors), probes=len(cold_a.probes))
        names = set(registered(live.model))
        in_place = _addresses(live)
        fingerprints: dict[str, set[str]] = {"a": set(), "b": set()}
        pushes: list[tuple[str, Tensors, list[Tensors] | None]] = [
            ("b", b, None),
            ("a", a, _one_each(a)),
            ("b", b, _shuffled(b, 5)),
            ("a", a, None),
            ("a", a, _shuffled(a, 2)),
            ("a", a, None),
        ]
        problems: list[str] = []
        for direction, tensors, cuts in pushes:
            proof = push(live, tensors, cuts=cuts)
            assert proof.tensors == len(tensors)
            assert proof.bytes == sum(tensor.nbytes for _, tensor in tensors)
            fingerprints[direction].add(proof.fingerprint)
            found = snapshot(live)
            problems += row.add(direction, found, cold_a if direction == "a" else cold_b)
            assert _scratch_still_alive(live) == []
        assert problems == []
        assert row.tokens
        assert row.logprobs
        assert [len(prints) for prints in fingerprints.values()] == [1, 1]
        assert fingerprints["a"] != fingerprints["b"]
        assert set(registered(live.model)) == names
        assert _addresses(live) == in_place


def _addresses(live: Engine) -> dict[str, int]:
    """Addresses of what post-load processing leaves alone: norms, embeddings, buffers. Experts are packed anew."""
    tensors = registered(live.model).items()
    return {name: tensor.data_ptr() for name, tensor in tensors if tensor.numel() and "experts" not in name}


def _scratch_still_alive(live: Engine) -> list[str]:
    """Name the groups whose tensors are gone and whose storage is not."""
    layout = find_layout(live.model)
    assert layout is not None
    gone = [group for group in layout.groups if all(member.live() is None for member in group.members)]
    assert gone
    return [group.name for group in gone if group.storage.alive]


def _write_checkpoint(like: Path, to: Path, tensors: Tensors) -> Path:
    """Write a checkpoint directory with other tensors."""
    shutil.copytree(like, to)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, to / "model.safetensors", {"format": "pt"})
    return to


def _start(live: Engine) -> ReloadSession:
    return start_reload(live.model, vllm_config=live.vllm_config, device=CPU, poison=True)


def _repaired(live: Engine, tensors: Tensors, wanted: Snapshot) -> bool:
    push(live, tensors)
    return snapshot(live).differing(wanted) == []


@pytest.mark.case("C41", "C63")
@pytest.mark.parametrize("key", ["qwen2", "qwen3_moe"])
def test_every_tensor_lands_in_its_own_place(key: str, root: Path, tmp_path: Path) -> None:
    """Tensor i holds i: two shards of equal shape that change places show."""
    tensors = [
        (name, torch.full_like(tensor, index + 1))
        for index, (name, tensor) in enumerate(read(checkpoint(key, 1, root)))
    ]
    with engine(_write_checkpoint(checkpoint(key, 1, root), tmp_path / "constants", tensors)) as started:
        wanted = _without_generation(started)
    with engine(checkpoint(key, 1, root)) as live:
        push(live, tensors, cuts=_shuffled(tensors, 3))
        assert _without_generation(live).differing(wanted) == []


def _without_generation(live: Engine) -> Snapshot:
    tensors = {name: tensor.detach().clone() for name, tensor in reachable_tensors(live.model)}
    return Snapshot(tensors, dict(probe_layers(live.model)), [], [])


@pytest.mark.case("C39")
@pytest.mark.parametrize("key", ["qwen3_moe", "llama_tied"])
def test_push_onto_dummy_weights(key: str, root: Path, cold: Callable[[str, int], Snapshot]) -> None:
    b, cold_b = read(checkpoint(key, 2, root)), cold(key, 2)
    with engine(checkpoint(key, 1, root), inner_format="dummy") as live:
        layout = find_layout(live.model)
        assert layout is not None
        assert layout.checkpoint is not None
        assert {spec.name for spec in layout.checkpoint} == {name for name, _ in b}
        generate(live)
        for cuts in (None, _shuffled(b, 4)):
            push(live, b, cuts=cuts)
            assert snapshot(live).differing(cold_b) == []
        assert generate(live) == (cold_b.tokens, cold_b.logprobs)


def test_dummy_weights_without_a_checkpoint_refuse_updates(root: Path, tmp_path: Path) -> None:
    directory = tmp_path / "bare"
    shutil.copytree(checkpoint("qwen3", 1, root), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    with engine(directory, inner_format="dummy") as live, pytest.raises(WeightPushError) as caught:
        check_reloadable(live.model)
    assert caught.value.code is ErrorCode.LAYOUT_UNKNOWN


@pytest.mark.case("C12", "C66")
def test_a_tied_head(root: Path, cold: Callable[[str, int], Snapshot]) -> None:
    b = read(checkpoint("llama_tied", 2, root))
    embedding = dict(b)["model.embed_tokens.weight"]
    cold_b = cold("llama_tied", 2)
    with engine(checkpoint("llama_tied", 1, root)) as tied:
        layout = find_layout(tied.model)
        assert layout is not None
        assert list(layout.optional) == ["lm_head.weight"]
        assert planner(tied).tied() == {"lm_head.weight": "model.embed_tokens.weight"}
        for position in (0, len(b)):
            both = [*b]
            both.insert(position, ("lm_head.weight", embedding))
            for cuts in (None, _one_each(both)):
                assert push(tied, both, cuts=cuts).tensors == len(b) + 1
                assert snapshot(tied).differing(cold_b) == []
                assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight

        def fails(tensors: Tensors, name: str) -> None:
            session = _start(tied)
            land(session, tensors)
            with pytest.raises(WeightPushError) as caught:
                finish_reload(session)
            assert caught.value.code is ErrorCode.PROOF_FAILED
            assert caught.value.details["tensor"] == name

        fails([*b, ("lm_head.weight", embedding + 1)], "lm_head.weight")
        fails([("lm_head.weight", embedding)], b[0][0])
        assert _repaired(tied, b, cold_b)


@pytest.mark.case("C12", "C13")
def test_tying_is_decided_anew_at_each_push(root: Path, tmp_path: Path) -> None:
    """The configuration says tied, but the checkpoint holds a head: vLLM ties them only while the two are equal."""
    base, other = read(checkpoint("llama_tied", 1, root)), read(checkpoint("llama_tied", 2, root))
    equal = [*base, ("lm_head.weight", dict(base)["model.embed_tokens.weight"].clone())]
    apart = [*other, ("lm_head.weight", dict(base)["model.embed_tokens.weight"].clone())]
    kinds: list[tuple[str, Tensors, bool]] = [("equal", equal, True), ("apart", apart, False)]
    directories = {
        name: _write_checkpoint(checkpoint("llama_tied", 1, root), tmp_path / name, tensors)
        for name, tensors, _ in kinds
    }
    wanted: dict[str, Snapshot] = {}
    for name in directories:
        with engine(directories[name]) as started:
            wanted[name] = snapshot(started)
    for first in directories:
        with engine(directories[first]) as running:
            for name, tensors, tied in [*kinds[::-1], *kinds]:
                push(running, tensors, cuts=_shuffled(tensors, 3))
                found = snapshot(running)
                assert found.differing(wanted[name]) == [], (first, name)
                assert (found.tokens, found.logprobs) == (wanted[name].tokens, wanted[name].logprobs)
                head, embedding = running.model.lm_head.weight, running.model.model.embed_tokens.weight
                assert (head is embedding) is tied


@pytest.fixture(scope="module")
def live(root: Path, cold: Callable[[str, int], Snapshot]) -> Iterator[Engine]:
    """A Qwen3 engine on A for the tests below, each of which ends with a complete push of its own choice."""
    cold("qwen3", 2)
    with engine(checkpoint("qwen3", 1, root)) as started:
        yield started


@pytest.mark.case("C4", "C42")
def test_a_failed_landing_names_the_tensor_and_a_complete_push_repairs(
    live: Engine, root: Path, cold: Callable[[str, int], Snapshot]
) -> None:
    b = read(checkpoint("qwen3", 2, root))
    broken = [(name, tensor[:-1] if index == len(b) // 2 else tensor) for index, (name, tensor) in enumerate(b)]
    name, tensor = b[len(b) // 2]
    session = _start(live)
    with pytest.raises(WeightPushError, match="could not be loaded") as caught:
        land(session, broken)
    assert caught.value.code is ErrorCode.LANDING_FAILED
    assert caught.value.details["tensor"] == name
    assert str(list(tensor.shape)) in caught.value.message
    for step in (lambda: land(session, b), lambda: finish_reload(session)):
        with pytest.raises(WeightPushError, match=f"'{name}' could not be loaded"):
            step()
    assert _repaired(live, b, cold("qwen3", 2))


@pytest.mark.case("C42")
def test_an_error_of_a_loader_keeps_its_type_and_text(
    live: Engine, root: Path, cold: Callable[[str, int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = read(checkpoint("qwen3", 2, root))

    def fail(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        raise ArithmeticError("no such rounding")

    session = _start(live)
    with monkeypatch.context() as patch:
        patch.setattr(live.model.model.norm.weight, "weight_loader", fail, raising=False)
        with pytest.raises(WeightPushError) as caught:
            land(session, b)
    assert caught.value.code is ErrorCode.LANDING_FAILED
    assert caught.value.details == {
        "tensor": "model.norm.weight",
        "exception": "ArithmeticError",
        "error": "no such rounding",
    }
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert torch.get_default_dtype() is torch.float32
    assert get_current_vllm_config_or_none() is None
    assert _repaired(live, b, cold("qwen3", 2))


@pytest.mark.case("C10", "C33")
@pytest.mark.parametrize("left_out", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_missing_tensor_is_named(
    left_out: str, live: Engine, root: Path, cold: Callable[[str, int], Snapshot]
) -> None:
    b = read(checkpoint("qwen3", 2, root))
    session = _start(live)
    land(session, [(name, tensor) for name, tensor in b if name != left_out])
    with pytest.raises(WeightPushError) as caught:
        finish_reload(session)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["tensor"] == left_out
    assert caught.value.details["missing"] == 1
    land(session, [(name, tensor) for name, tensor in b if name == left_out])
    finish_reload(session)
    assert snapshot(live).differing(cold("qwen3", 2)) == []


@pytest.mark.case("C27", "C59")
@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (lambda name, tensor: [(name, tensor), (name, tensor)], "arrived twice"),
        (lambda name, tensor: [(f"{name}.extra", tensor)], "no tensor of that name"),
        (lambda name, tensor: [(name, tensor.float())], "given float32"),
        (lambda name, tensor: [(name, tensor.to(torch.complex64))], "cannot be pushed"),
    ],
)
def test_what_the_checkpoint_does_not_have_is_not_landed(
    offer: Callable[[str, torch.Tensor], Tensors], reason: str, live: Engine, root: Path
) -> None:
    a = read(checkpoint("qwen3", 1, root))
    session = _start(live)
    with pytest.raises(WeightPushError, match=reason) as caught:
        land(session, offer(*a[3]))
    assert caught.value.code is ErrorCode.LANDING_FAILED
    assert caught.value.details["tensor"].startswith(a[3][0])
    push(live, a)


@pytest.mark.case("C49")
def test_a_loader_that_drops_bytes_is_caught(
    live: Engine, root: Path, cold: Callable[[str, int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = read(checkpoint("qwen3", 2, root))

    def drop_last_row(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.data[:-1].copy_(tensor[:-1])

    session = _start(live)
    with monkeypatch.context() as patch:
        patch.setattr(live.model.model.norm.weight, "weight_loader", drop_last_row, raising=False)
        land(session, b)
        with pytest.raises(WeightPushError, match="not all of it was written") as caught:
            finish_reload(session)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["tensor"] == "model.norm.weight"
    assert _repaired(live, b, cold("qwen3", 2))


def test_a_loader_that_adopts_the_received_tensor_gets_a_copy(
    live: Engine, root: Path, cold: Callable[[str, int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a loader writes nothing, at cold start either; the buffer it took is about to be used again."""
    b = read(checkpoint("qwen3", 2, root))
    layout = find_layout(live.model)
    assert layout is not None
    (group,) = [group for group in layout.groups if group.name == "model.norm.weight"]

    def adopt(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.data = tensor

    with monkeypatch.context() as patch:
        patch.setattr(live.model.model.norm.weight, "weight_loader", adopt, raising=False)
        patch.setattr(group, "required", ByteRanges())
        push(live, b)
    assert snapshot(live).differing(cold("qwen3", 2)) == []


@pytest.mark.case("C4", "C38")
def test_processing_that_fails_half_way_is_repaired(
    live: Engine, root: Path, cold: Callable[[str, int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = read(checkpoint("qwen3", 2, root))

    def fail(layer: Any) -> None:
        raise MemoryError("no room to pack")

    session = _start(live)
    land(session, b)
    with monkeypatch.context() as patch:
        patch.setattr(live.model.model.layers[1].self_attn.qkv_proj.quant_method, "process_weights_after_loading", fail)
        with pytest.raises(WeightPushError, match="MemoryError: no room to pack") as caught:
            finish_reload(session)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert _repaired(live, b, cold("qwen3", 2))


@pytest.mark.case("C68")
def test_poison_fills_all_that_a_push_must_write(
    live: Engine, root: Path, cold: Callable[[str, int], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTPUSH_POISON", "1")
    session = start_reload(live.model, vllm_config=live.vllm_config, device=CPU)
    loaded = {name for name, _ in live.model.named_parameters()}
    assert [name for name in loaded if not registered(live.model)[name].isnan().all()] == []
    b = read(checkpoint("qwen3", 2, root))
    land(session, b[:5])
    assert _repaired(live, b, cold("qwen3", 2))


@pytest.mark.case("C4")
def test_a_session_that_is_over_writes_nothing(live: Engine, root: Path) -> None:
    a, b = read(checkpoint("qwen3", 1, root)), read(checkpoint("qwen3", 2, root))
    stale = _start(live)
    closed = _start(live)
    with pytest.raises(WeightPushError, match="a later update") as caught:
        land(stale, b)
    assert caught.value.code is ErrorCode.STALE_UPDATE
    land(closed, a)
    before = finish_reload(closed).fingerprint
    for step in (lambda: land(closed, b), lambda: finish_reload(closed), lambda: finish_reload(stale)):
        with pytest.raises(WeightPushError, match=r"is over|has been closed"):
            step()
    assert fingerprint(live.model) == before


@pytest.mark.case("C95")
def test_a_refusal_changes_nothing(live: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(live.model)
    objects = registered(live.model)
    norm = live.model.model.norm

    def refused(code: ErrorCode, text: str) -> None:
        for ask in (lambda: check_reloadable(live.model), lambda: _start(live)):
            with pytest.raises(WeightPushError, match=text) as caught:
                ask()
            assert caught.value.code is code

    method = live.model.model.layers[0].mlp.down_proj.quant_method
    with monkeypatch.context() as patch:
        patch.setattr(method, "uses_meta_device", True)
        refused(ErrorCode.ONLINE_QUANTIZATION, r"'model\.layers\.0\.mlp\.down_proj'.*quantized while loading")
    with monkeypatch.context() as patch:
        patch.setitem(norm._parameters, "weight", torch.nn.Parameter(torch.empty(64, device="meta")))
        refused(ErrorCode.RELOAD_REFUSED, r"'model\.norm\.weight'.*meta")
    with monkeypatch.context() as patch:
        patch.setattr(live.model.model.layers[0].mlp.down_proj, "quant_method", object())
        refused(ErrorCode.RELOAD_REFUSED, "quantization method was UnquantizedLinearMethod and is object now")
    with monkeypatch.context() as patch:
        patch.delitem(live.model.__dict__, "_weightpush_layout")
        refused(ErrorCode.LAYOUT_UNKNOWN, "--load-format weightpush")
    assert fingerprint(live.model) == before
    assert all(objects[name] is tensor for name, tensor in registered(live.model).items())
    check_reloadable(live.model)


def test_the_loader_serves_vllms_own_questions(live: Engine, root: Path) -> None:
    loader = get_model_loader(live.vllm_config.load_config)
    assert live.vllm_config.load_config.load_format == "weightpush"
    assert loader.get_external_weight_memory(live.vllm_config) == 0
    weights = dict(loader.get_all_weights(live.vllm_config.model_config, live.model))
    assert sorted(weights) == [name for name, _ in read(checkpoint("qwen3", 1, root))]
