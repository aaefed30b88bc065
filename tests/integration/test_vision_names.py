"""Names of vision-language models: a trainer, a checkpoint and vLLM each call the same tensor something else.

The image is switched off, so that the tower of the checkpoint has no place in the server, as in text-only RL.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, PaliGemmaConfig

from support.engine import Tensors, engine, planner, push, push_by, read, snapshot, specs
from support.tiny import checkpoint, tiny_model
from weightpush_protocol.errors import ErrorCode, WeightPushError

TEXT = {
    "model_type": "gemma",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
#: How a trainer may call what the checkpoint calls ``language_model.model.*``, ``vision_tower.*``, ...
IN_MEMORY = "model.language_model."


pytestmark = pytest.mark.usefixtures("in_process")


def make_checkpoint(path: Path, seed: int) -> Tensors:
    """Write a checkpoint and return the same tensors under the names that they have in the trainer's memory."""
    config = PaliGemmaConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=127, projection_dim=64, hidden_size=64, pad_token_id=0
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    tiny_model().randomize(model, seed)
    model.save_pretrained(path)
    tiny_model().make_tokenizer().save_pretrained(path)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def runtime_names(tensors: Tensors) -> Tensors:
    """Return the language model under vLLM's own names, with its projections fused."""
    named = dict(tensors)
    renamed: Tensors = []
    for name, tensor in tensors:
        if not name.startswith("language_model."):
            continue
        if name.endswith("q_proj.weight"):
            parts = [named[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            renamed.append((name.replace("q_proj", "qkv_proj"), torch.cat(parts)))
        elif name.endswith("gate_proj.weight"):
            parts = [named[name.replace("gate_proj", part)] for part in ("gate_proj", "up_proj")]
            renamed.append((name.replace("gate_proj", "gate_up_proj"), torch.cat(parts)))
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            renamed.append((name, tensor))
    return renamed


@pytest.mark.case("C52")
def test_every_name_that_the_model_knows_lands_and_every_other_is_refused_before_a_write(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", 1)
    in_memory = make_checkpoint(tmp_path / "b", 2)
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    assert {name for name, _ in in_memory} != {name for name, _ in b}
    with engine(tmp_path / "a", limit_mm_per_prompt={"image": 0}) as live:
        cold_a = snapshot(live)
        push(live, b, planned=False)
        loaded_b = snapshot(live)
        assert cold_a.differing(loaded_b) != []
        accepted = {"the checkpoint's": b, "the trainer's": in_memory, "vLLM's": runtime_names(b)}
        for whose, tensors in accepted.items():
            push(live, a)
            assert snapshot(live).differing(cold_a) == []
            push_by(live, planner(live).admit(specs(tensors)), tensors)
            assert snapshot(live).differing(loaded_b) == [], whose
        text = [(name.removeprefix(IN_MEMORY), tensor) for name, tensor in in_memory if name.startswith(IN_MEMORY)]
        refused = {
            # The inner language model alone, by its own names and as a causal model's; and a wrapped model.
            "'language_model.model.': add it": text,
            "'language_model.': add it": [(f"model.{name}", t) for name, t in text],
            "'module.': strip it": [(f"module.{name}", tensor) for name, tensor in b],
        }
        for hint, tensors in refused.items():
            with pytest.raises(WeightPushError, match=re.escape(hint)) as caught:
                planner(live).admit(specs(tensors))
            assert caught.value.code is ErrorCode.MANIFEST_REJECTED
            assert f"unknown: {tensors[0][0]}" in caught.value.message
        stray = [*in_memory, ("model.vision_tower.head.probes", dict(b)["vision_tower.head.probe"])]
        with pytest.raises(WeightPushError, match=r"unknown: model\.vision_tower\.head\.probes"):
            planner(live).admit(specs(stray))
        assert snapshot(live).differing(loaded_b) == []


@pytest.mark.case("C53")
def test_a_text_only_member_of_such_a_family_takes_its_own_names_and_refuses_the_family_s(tmp_path: Path) -> None:
    a, b = read(checkpoint("gemma3", 1, tmp_path)), read(checkpoint("gemma3", 2, tmp_path))
    embedding = next(tensor for name, tensor in b if name == "model.embed_tokens.weight")
    with engine(checkpoint("gemma3", 1, tmp_path)) as live:
        push(live, b)
        pushed_b = snapshot(live)
        push(live, a)
        cold_a = snapshot(live)
        family = [(name.replace("model.", IN_MEMORY, 1), tensor) for name, tensor in b]
        with pytest.raises(
            WeightPushError, match=re.escape("'model.language_model.' where this model has 'model.'")
        ) as caught:
            planner(live).admit(specs(family))
        assert caught.value.code is ErrorCode.MANIFEST_REJECTED
        assert family[0][0] in caught.value.message
        assert snapshot(live).differing(cold_a) == []
        with_head = [*b, ("lm_head.weight", embedding.clone())]
        push_by(live, planner(live).admit(specs(with_head)), with_head)
        assert snapshot(live).differing(pushed_b) == []
