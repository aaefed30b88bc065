"""TRL's own GRPOTrainer, with the recipe of docs/integrations.md: it generates on a real server and pushes into it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.recipes import run_recipe
from support.server import ServerProcess
from support.tiny import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="TRL is not installed (it brings pyarrow and pandas): make test-trl installs it and runs this",
    ),
    pytest.mark.filterwarnings("ignore::UserWarning:trl"),
]

STEPS = 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "model"
    example = tiny_model()
    example.make_tiny_checkpoint(folder, config=example.QWEN3_CONFIG, model_type="qwen3", seed=1, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--dtype", "float32", "--logprobs-mode", "processed_logprobs")
    with ServerProcess(model_folder, options, folder=tmp_path_factory.mktemp("trl-server")) as server:
        yield server


@pytest.fixture
def train(
    server: ServerProcess, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[dict[str, Any]]]:
    """Run a GRPOTrainer with the recipe and return what it logged at each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", grpo_trainer.VLLMGeneration)

    def letters(completions: list[str], **_: object) -> list[float]:
        return [sum(letter.isalpha() for letter in text) / 8 for text in completions]

    def train_now() -> list[dict[str, Any]]:
        config = GRPOConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            bf16=False,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.url,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            max_steps=STEPS,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
            reward_funcs=letters,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["one", "two", "three", "four"] * 8}),
            processing_class=AutoTokenizer.from_pretrained(model_folder),
        )
        trainer.train()
        return [entry for entry in trainer.state.log_history if "reward" in entry]

    return train_now


def differences(log: list[dict[str, Any]]) -> list[float]:
    """Return the largest difference between the server's and the trainer's log-probabilities at each step."""
    return [entry["sampling/sampling_logp_difference/max"] for entry in log]


@pytest.mark.case("C83")
def test_the_server_samples_from_the_weights_of_the_step(
    server: ServerProcess, train: Callable[[], list[dict[str, Any]]]
) -> None:
    run_recipe("TRL: GRPOTrainer")
    pushed = differences(train())
    assert len(pushed) == STEPS
    assert max(pushed) < 1e-4
    status = server.status()
    assert (status["weight_version"], status["state"]) == (f"push-{STEPS}", "serving")


def test_without_pushes_it_does_not(
    server: ServerProcess, train: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = run_recipe("TRL: GRPOTrainer")["PushedGeneration"]
    push, calls = generation.sync_weights, []

    def push_once(self: Any) -> None:
        if not calls:
            push(self)
        calls.append(None)

    monkeypatch.setattr(generation, "sync_weights", push_once)
    stale = differences(train())
    assert stale[0] < 1e-4
    assert stale[-1] > 1e-2
