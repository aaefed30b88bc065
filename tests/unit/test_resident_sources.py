"""Weights that lie in the trainer's memory as they did at the last push: found again, and copied many at a time."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from support.tiny import configurations
from weightpush_client.align import Outgoing
from weightpush_client.copies import Joined, Programs, Run
from weightpush_client.sources import TensorSource, Weights, WeightSource, open_source
from weightpush_client.sources.keeper import SourceKeeper
from weightpush_client.sources.resident import ResidentSource
from weightpush_client.stream import BucketStream, Buffers
from weightpush_protocol.manifest import Manifest, TensorSpec, build_manifest
from weightpush_protocol.messages import DigestKind

CPU = torch.device("cpu")


def held(source: WeightSource) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in source.specs()]
    return {name: tensor.clone() for name, tensor in source.tensors(names)}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def sent(source: WeightSource, dtypes: Mapping[str, str], bucket_bytes: int, programs: Programs | None = None) -> Any:
    """Push ``source`` into a list: buckets and digests as they would leave."""
    outgoing = [
        Outgoing(held=spec, sent=TensorSpec(name=spec.name, dtype=dtypes.get(spec.name, spec.dtype), shape=spec.shape))
        for spec in source.specs()
    ]
    return stream(source, outgoing, build_manifest((item.sent for item in outgoing), bucket_bytes), programs)


def stream(source: WeightSource, outgoing: list[Outgoing], manifest: Manifest, programs: Programs | None) -> Any:
    found: list[tuple[bytes, bytes]] = []
    stream = BucketStream(
        source,
        outgoing,
        manifest,
        deliver=lambda _, buffer, digests: found.append((buffer.numpy().tobytes(), digests)),
        interrupt=lambda: None,
        delivered=lambda _: None,
        digest=DigestKind.WP64,
        device=CPU,
        buffers=Buffers(),
        programs=programs,
    )
    stream.run()
    return found, dict(stream.digests)


# found again


def experts(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return experts that are views of packed weights, a tensor of its own, a transposed one, and a tied name."""
    torch.manual_seed(seed)
    gate_up, down = torch.randn(6, 8, 5), torch.randn(6, 5, 4)
    weights = {}
    for number in range(6):
        weights[f"{number}.gate"] = gate_up[number, :4]
        weights[f"{number}.up"] = gate_up[number, 4:]
        weights[f"{number}.down"] = down[number]
    weights["norm"] = torch.randn(7)
    weights["turned"] = torch.randn(3, 9).t()
    return {**weights, "tied": weights["norm"], "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))
    model.register_buffer("table", torch.randn(3))
    return model


@pytest.mark.parametrize("make", [experts, linear])
def test_the_next_weights_of_the_same_kind_are_read_where_they_lie(make: Callable[[int], Weights]) -> None:
    keeper = SourceKeeper()
    first = make(0)
    assert same(held(keeper.open(first)), held(open_source(first)))
    if isinstance(first, nn.Module):
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.mul_(3)
        second: Weights = first
    else:
        second = make(1)
    source = keeper.open(second)
    assert isinstance(source, ResidentSource)
    assert same(held(source), held(open_source(second)))
    plain = open_source(second)
    names = [spec.name for spec in source.specs()]
    assert source.specs() == plain.specs()
    pairs = [(one, other) for one in names for other in names]
    assert [source.identity(one) == source.identity(other) for one, other in pairs] == [
        plain.identity(one) == plain.identity(other) for one, other in pairs
    ]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("norm", torch.randn(8)),
        ("norm", torch.randn(7, dtype=torch.float64)),
        ("turned", torch.randn(9, 3)),
        ("norm", torch.randn(7, dtype=torch.complex64).conj().imag),
        ("another", torch.randn(2)),
    ],
)
def test_weights_that_differ_in_more_than_their_bytes_are_looked_at_anew(name: str, other: torch.Tensor) -> None:
    keeper = SourceKeeper()
    keeper.open(experts())
    changed = {**experts(1), name: other}
    assert same(held(keeper.open(changed)), held(open_source(changed)))


def test_a_module_of_another_class_or_with_other_tensors_is_looked_at_anew() -> None:
    keeper = SourceKeeper()
    model = linear()
    keeper.open(model)
    other = linear(1)
    assert same(held(keeper.open(other)), held(open_source(other)))
    other[1] = nn.Identity()
    assert same(held(keeper.open(other)), held(open_source(other)))
    assert same(held(keeper.open(dict(other.state_dict()))), held(open_source(other)))


def test_nothing_is_kept_alive_between_pushes() -> None:
    keeper, programs = SourceKeeper(), Programs()
    for _ in range(2):
        weights = experts()
        gone = [weakref.ref(tensor.untyped_storage()) for tensor in weights.values()]
        sent(keeper.open(weights), {}, 100, programs)
        del weights
        gc.collect()
        assert [storage() for storage in gone] == [None] * len(gone)


@pytest.mark.parametrize("key", ["qwen3_moe", "qwen3_next", "llama", "qwen3_tied"])
def test_models_of_transformers_are_read_as_they_are_saved(key: str) -> None:
    entry = configurations()[key]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(entry["model_type"], **entry["config"]))
    keeper = SourceKeeper()
    source = keeper.open(model)
    assert same(held(source), held(open_source(model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    again = keeper.open(model)
    assert isinstance(again, ResidentSource)
    assert same(held(again), held(open_source(model)))
    assert not same(held(again), held(keeper.open({name: -tensor for name, tensor in model.state_dict().items()})))


def test_what_is_computed_is_computed_at_every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    entry = configurations()["qwen3_moe"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(entry["model_type"], **entry["config"]))
    revert = core_model_loading.revert_weight_conversion

    def doubled(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Not to be told from a plain copy without data, but by what it is called.
        return {name: torch.add(tensor, tensor) for name, tensor in revert(model, tensors).items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", doubled)
    keeper = SourceKeeper()
    for _ in range(2):
        source = keeper.open(model)
        assert not isinstance(source, ResidentSource)
        assert same(held(source), held(open_source(model)))


def test_a_conversion_that_does_with_data_what_it_does_not_without_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import core_model_loading

    entry = configurations()["qwen3_moe"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(entry["model_type"], **entry["config"]))
    revert = core_model_loading.revert_weight_conversion

    def sly(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = revert(model, tensors)
        return {name: tensor if tensor.is_meta else tensor + tensor for name, tensor in made.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", sly)
    assert not isinstance(SourceKeeper().open(model), ResidentSource)


# copied


def shuffled(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of many kinds in an order that no plan would choose."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    packed = torch.randn(12, 4, 6, dtype=torch.bfloat16)
    weights = {f"expert.{number}": packed[number] for number in range(12)}
    weights |= {f"column.{number}": packed[:, number] for number in range(4)}
    weights |= {f"small.{number}": torch.randn(rng.randrange(0, 5), 3) for number in range(20)}
    weights |= {
        f"bytes.{number}": torch.randint(0, 255, (rng.randrange(1, 9),), dtype=torch.uint8) for number in range(9)
    }
    weights |= {"turned": torch.randn(5, 8).t(), "large": torch.randn(70_000), "step": torch.arange(40)[::3]}
    names = list(weights)
    rng.shuffle(names)
    return {name: weights[name] for name in names}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bucket_bytes", [64, 700, 2**20])
def test_buckets_are_to_the_byte_those_of_one_tensor_after_the_other(seed: int, bucket_bytes: int) -> None:
    casts = {f"small.{number}": "bfloat16" for number in range(0, 20, 2)} | {"turned": "float16", "expert.3": "float32"}
    keeper, programs = SourceKeeper(), Programs()
    for turn in range(3):
        weights = shuffled(seed)
        for tensor in weights.values():
            tensor.add_(turn)
        source = keeper.open(weights)
        assert isinstance(source, ResidentSource)
        assert sent(source, casts, bucket_bytes, programs) == sent(TensorSource(weights.items()), casts, bucket_bytes)


def test_the_copies_of_a_push_are_those_of_the_last_one_where_tensors_lie_alike() -> None:
    keeper, programs = SourceKeeper(), Programs()
    weights = experts()
    outgoing = [Outgoing(held=spec, sent=spec) for spec in keeper.open(weights).specs()]
    manifest = build_manifest((item.sent for item in outgoing), 2**20)

    def program(weights: dict[str, torch.Tensor]) -> Any:
        source = keeper.open(weights)
        assert isinstance(source, ResidentSource)
        return programs.of(source, outgoing, manifest)

    first = program(weights)
    copies = [copy for bucket in first.buckets for window in bucket for copy in window.copies]
    # Gates, ups and downs of all experts.
    assert sum(isinstance(copy, Run) and len(copy.shape) == 3 and copy.shape[0] == 6 for copy in copies) == 3
    assert program(weights) is first
    assert program(experts(1)) is first
    apart = {name: tensor.clone() for name, tensor in experts(2).items()}
    apart["turned"] = experts(2)["turned"]
    assert program(apart) is not first
    plain = TensorSource(apart.items())
    assert stream(keeper.open(apart), outgoing, manifest, programs) == stream(plain, outgoing, manifest, None)


def test_tensors_at_the_same_addresses_may_lie_in_memory_of_their_own() -> None:
    memory = bytearray(4 * 6 * 10)

    def row(start: int, rows: int) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.float32, offset=4 * 10 * start, count=10 * rows)

    together = dict(zip("abcdef", row(0, 6).view(6, 10), strict=True))
    alone = {name: row(number, 1) for number, name in enumerate("abcdef")}
    assert [tensor.data_ptr() for tensor in together.values()] == [tensor.data_ptr() for tensor in alone.values()]
    keeper, programs = SourceKeeper(), Programs()
    outgoing = [Outgoing(held=spec, sent=spec) for spec in keeper.open(together).specs()]
    manifest = build_manifest((item.sent for item in outgoing), 2**20)
    made = []
    for weights in (together, together, alone, together):
        for number, tensor in enumerate(weights.values()):
            tensor.fill_(number)
        source = keeper.open(weights)
        assert isinstance(source, ResidentSource)
        made.append(programs.of(source, outgoing, manifest))
        plain = TensorSource(weights.items())
        assert stream(source, outgoing, manifest, programs) == stream(plain, outgoing, manifest, None)
    assert made[0] is made[1]
    assert made[2] is not made[1]


def test_small_tensors_that_have_nothing_in_common_are_joined() -> None:
    weights = {f"t{number}": torch.randn(number + 1) for number in range(50)}
    keeper, programs = SourceKeeper(), Programs()
    source = keeper.open(weights)
    assert isinstance(source, ResidentSource)
    outgoing = [Outgoing(held=spec, sent=spec) for spec in source.specs()]
    manifest = build_manifest((item.sent for item in outgoing), 2**20)
    (bucket,) = programs.of(source, outgoing, manifest).buckets
    (window,) = bucket
    assert [len(copy.leaves) for copy in window.copies if isinstance(copy, Joined)] == [50]
    assert len(window.copies) == 1
