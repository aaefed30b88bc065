"""The task and the model: repeat a letter.

The prompt is one letter and an equals sign, the reward is the share of the answer's tokens that are that letter. A
random model gets 1 in 32; a model that has learnt it, everything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tiny_model import EOS, PAD, make_tokenizer

LETTERS: Final = "abcdefgh"
#: Token id = position.
VOCABULARY: Final = (PAD, EOS, "\n", " ", "?", "=", *(chr(code) for code in range(ord("a"), ord("z") + 1)))
ANSWER_TOKENS: Final = 8

#: Qwen3 with two layers, 102,848 parameters.
MODEL_CONFIG: Final[dict[str, Any]] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(EOS),
    "pad_token_id": VOCABULARY.index(PAD),
}


def make_model(seed: int) -> PreTrainedModel:
    """Return the untrained model in float32."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL_CONFIG)).float()


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint that vLLM serves."""
    model.save_pretrained(folder)
    make_tokenizer(VOCABULARY).save_pretrained(folder)


def make_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Return ``count`` prompts of two token ids, every letter as often as the others, shuffled."""
    letters = [LETTERS[number % len(LETTERS)] for number in range(count)]
    rng.shuffle(letters)
    return [[VOCABULARY.index(letter), VOCABULARY.index("=")] for letter in letters]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of the answer's tokens that are the prompt's letter, 0 to 1."""
    return sum(token == prompt[0] for token in answer) / len(answer)


def probe_tokens(sequences: int = 8, length: int = 64) -> list[list[int]]:
    """Return fixed random token ids, on which servers and trainer are compared after each push.

    Random ones: a policy that has converged gives its own samples a probability of one, also with stale weights.
    """
    generator = torch.Generator().manual_seed(0)
    tokens: list[list[int]] = torch.randint(len(VOCABULARY), (sequences, length), generator=generator).tolist()
    return tokens
