"""Models that transformers holds in another layout than their checkpoints are pushed as it would save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from support.tiny import configurations
from weightpush_client.align import align
from weightpush_client.sources import conversion, open_source
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import ManifestAnswer

#: Packed experts, and two whose tensors are only named differently.
CONVERTED = {"qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v2_noq", "qwen3_next"} | {
    "gpt_neox",
    "granitemoe",
}


def make(key: str) -> Any:
    entry = configurations()[key]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(entry["model_type"], **entry["config"]))


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.case("C56")
@pytest.mark.parametrize("key", sorted(configurations()))
def test_a_model_is_pushed_as_it_is_saved(key: str, tmp_path: Path) -> None:
    model = make(key)
    wanted = saved(model, tmp_path)
    source = open_source(model)
    expected = ManifestAnswer(tensors=[TensorSpec.of(name, tensor) for name, tensor in wanted.items()])
    # A second name of a tied tensor is not saved, nor sent.
    outgoing = align(source, expected)
    assert {item.sent.name for item in outgoing} == set(wanted)
    converted = set()
    for name, tensor in source.tensors([item.held.name for item in outgoing]):
        assert tensor.dtype is wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name
        if name not in model.state_dict():
            converted.add(name)
    assert bool(converted) == (key in CONVERTED)


def test_layers_are_repacked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe")
    calls = []
    from transformers.core_model_loading import revert_weight_conversion

    def counted(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
        calls.append(list(tensors))
        return revert_weight_conversion(model, tensors)

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", counted)
    source = open_source(nn.parallel.DataParallel(torch.compile(model)))
    assert len(calls.pop()) == len(model.state_dict())
    reading = source.tensors([spec.name for spec in source.specs() if ".experts." in spec.name])
    next(reading)
    assert len(calls) == 1
    assert len(calls[0]) == 1
    list(reading)
    packed = [name for name in model.state_dict() if ".experts." in name]
    assert sorted(name for call in calls for name in call) == sorted(packed)


def test_what_transformers_cannot_bring_back_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe")
    for layer in model.model.layers:
        # One dimension too few for the way back.
        layer.mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(2))
    with pytest.raises(WeightPushError, match=r"transformers cannot bring .* back to the layout of its") as caught:
        open_source(model)
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


def test_a_model_of_another_kind_is_left_alone() -> None:
    plain = nn.ModuleDict({"a": nn.Linear(2, 2), "experts": nn.ParameterDict({"gate_up_proj": torch.zeros(2, 4, 2)})})
    assert [spec.name for spec in open_source(plain).specs()] == list(plain.state_dict())
    assert conversion.as_saved(plain, []) == []
