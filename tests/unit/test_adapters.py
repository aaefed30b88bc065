"""PEFT models are pushed as their base model with the active adapters merged, and are not touched by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft accelerate")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from support.contract_server import TOKEN, ContractServer  # noqa: E402 - after the check for peft
from support.tiny import configurations  # noqa: E402
from weightpush_client import WeightPusher  # noqa: E402
from weightpush_client.sources import open_source  # noqa: E402
from weightpush_protocol.errors import ErrorCode, WeightPushError  # noqa: E402
from weightpush_protocol.manifest import TensorSpec  # noqa: E402


def base_model(key: str, dtype: torch.dtype = torch.float32) -> Any:
    entry = configurations()[key]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(entry["model_type"], **entry["config"])).to(dtype)


def adapted(key: str = "qwen3", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    model = peft.get_peft_model(base_model(key, dtype), peft.LoraConfig(r=4, **{"target_modules": ["q_proj"]} | config))
    train(model)
    return model


def train(model: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def pushed(model: nn.Module) -> dict[str, torch.Tensor]:
    source = open_source(model)
    specs = source.specs()
    tensors = {name: tensor.clone() for name, tensor in source.tensors([spec.name for spec in specs])}
    assert specs == [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
    return tensors


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.case("C35", "C54")
@pytest.mark.parametrize(
    ("key", "dtype", "config"),
    [
        ("qwen3", torch.float32, {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}),
        ("qwen3", torch.float32, {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["norm"]}),
        ("qwen2", torch.bfloat16, {"target_modules": "all-linear", "use_rslora": True}),
        ("phi", torch.float32, {"target_modules": ["q_proj"], "lora_bias": True}),
        ("gpt2", torch.float32, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("qwen3_moe", torch.float32, {"target_modules": ["q_proj", "o_proj"]}),
    ],
    ids=["linear", "embedding", "bfloat16", "bias", "conv1d", "moe"],
)
def test_what_is_pushed_is_what_merging_makes_and_the_model_keeps_every_bit(
    key: str, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    model = adapted(key, dtype, init_lora_weights=False, **config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    base = pushed(base_model(key, dtype))
    found = pushed(model)
    assert_same(dict(model.state_dict()), before)
    assert list(found) == list(base)
    assert any(not torch.equal(found[name], base[name]) for name in base)
    assert_same(found, pushed(model.merge_and_unload()))


def test_several_active_adapters_are_summed_and_an_inactive_one_does_not_count() -> None:
    model = adapted(init_lora_weights=False, modules_to_save=["lm_head"])
    for name in ("second", "reference"):
        model.add_adapter(name, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    found = pushed(model)
    trained = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(found["lm_head.weight"], trained)
    assert_same(found, pushed(model.merge_and_unload(adapter_names=["default", "second"])))


def test_adapters_that_are_merged_already_are_not_added_twice() -> None:
    model = adapted(init_lora_weights=False)
    wanted = pushed(model)
    model.merge_adapter()
    assert_same(pushed(model), wanted)


def test_wrapped_adapters_are_merged() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = adapted(init_lora_weights=False)
    wanted = pushed(model)
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(torch.compile(layers[0]))
    assert_same(pushed(nn.DataParallel(torch.compile(model))), wanted)


def injected() -> nn.Module:
    """Adapters in a model of the user's own, which is no ``PeftModel``."""
    model = base_model("qwen3")
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), model)


def test_injected_adapters_are_merged() -> None:
    base, found = pushed(base_model("qwen3")), pushed(injected())
    assert list(found) == list(base)
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2)}


def switched_off() -> nn.Module:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def half_merged() -> nn.Module:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    model.base_model.merge_adapter(["default"])
    return model


def with_leftover() -> nn.Module:
    model = adapted()
    model.base_model.model.model.lora_A = nn.Linear(2, 2)
    return model


@pytest.mark.case("C35")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted(use_dora=True), "'base_model.model.model.layers.0.self_attn.q_proj' is no plain LoRA"),
        (
            lambda: adapted("qwen3_moe", target_parameters=["mlp.experts.gate_up_proj"], target_modules=[]),
            r"experts' is a peft\.tuners\.lora\.layer\.ParamWrapper: of adapters only plain LoRA",
        ),
        (
            lambda: peft.get_peft_model(
                base_model("qwen3"), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
            ),
            r"q_proj' is a peft\.tuners\.ia3\.layer\.Linear",
        ),
        (lambda: adapted(trainable_token_indices=[1, 2]), r"embed_tokens' is a peft\..*TrainableTokens"),
        (switched_off, "are switched off: switch them on"),
        (half_merged, r"has adapters \['default'\] merged and \['default', 'second'\] active"),
        (with_leftover, r"'base_model.model.model.lora_A.weight' belongs to an adapter"),
    ],
    ids=["dora", "parameters", "ia3", "tokens", "off", "half-merged", "leftover"],
)
def test_what_cannot_be_merged_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(WeightPushError, match=message) as caught:
        open_source(make())
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


@pytest.fixture
def server() -> Iterator[ContractServer]:
    names = pushed(base_model("qwen3")).items()
    server = ContractServer([TensorSpec(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in names])
    yield server
    server.close()


@pytest.mark.case("C54")
def test_a_push_under_the_names_of_the_base_model(server: ContractServer) -> None:
    model = adapted(init_lora_weights=False, modules_to_save=["lm_head"])
    with WeightPusher(server.url, token=TOKEN, transport="http", bucket_bytes=5000) as pusher:
        pusher.push(model, weight_version="1")
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in pushed(model.merge_and_unload()).items()}
    assert_same({name: server.weights[name] for name in wanted}, wanted)
    assert len(server.weights) == len(wanted)
