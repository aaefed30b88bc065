"""Make a tiny random checkpoint that vLLM serves in seconds: a model to push weights into, without any download.

Run ``python examples/tiny_model.py DIR --seed N``. Two seeds give two models of one architecture whose greedy answers
differ within the first few characters. Every tensor is random (norms and biases too), so that a tensor which a push
forgets shows. The tokenizer has one token per printable character.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PAD: Final = "<pad>"
EOS: Final = "<eos>"
#: Token id = position: padding, end of text, newline, then ASCII from space to tilde.
VOCABULARY: Final = (PAD, EOS, "\n", *(chr(code) for code in range(ord(" "), ord("~") + 1)))

#: vLLM on two CPU cores, as quickly as it starts.
CPU_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Qwen3 with two layers, about 0.1 M parameters.
QWEN3_CONFIG: Final[dict[str, Any]] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(EOS),
    "pad_token_id": VOCABULARY.index(PAD),
}


def make_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return a character tokenizer; a character that it does not know becomes a question mark."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token="?")


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter with seeded noise that keeps activations at a useful scale.

    A vector keeps its initial value as mean (one for most norms, zero for biases). Each parameter's noise depends on
    ``seed`` and its name alone, so that one architecture gives the same tensors whatever order it lists them in.
    """
    for name, parameter in model.named_parameters():
        # Of a seed torch's generator takes the low 32 bits only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_((0.2 * noise).to(parameter.dtype))
        elif "embed" in name or "wte" in name:
            # Small beside what the layers add: a tied head would else only repeat its input.
            parameter.copy_(0.1 * noise)
        else:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def make_tiny_checkpoint(
    path: str | Path, *, config: Mapping[str, Any], model_type: str, seed: int, dtype: str = "bfloat16"
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer to the directory ``path``.

    Args:
        path: made where it does not exist.
        config: what the architecture's configuration takes; ``vocab_size`` must be at least the tokenizer's 98.
        model_type: the architecture, in the spelling of ``config.json``.
        seed: of the weights.
        dtype: of the weights, a torch name.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's.
    """
    settings = {"vocab_size": len(VOCABULARY), **config}
    if settings["vocab_size"] < len(VOCABULARY):
        raise ValueError(f"vocab_size {settings['vocab_size']} is below the tokenizer's {len(VOCABULARY)}: raise it")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    model.to(getattr(torch, dtype))
    randomize(model, seed)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def main() -> None:
    """Command line: ``python examples/tiny_model.py DIR [--seed N]``."""
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3 checkpoint with a character tokenizer.")
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    arguments = parser.parse_args()
    make_tiny_checkpoint(arguments.directory, config=QWEN3_CONFIG, model_type="qwen3", seed=arguments.seed)
    print(f"wrote {arguments.directory} (seed {arguments.seed})")


if __name__ == "__main__":
    main()
