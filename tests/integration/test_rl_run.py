"""The RL example on real servers under Ray: it learns, and goes on and stays exact when a server is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import TOKEN, Checkpoints
from support.recipes import run_recipe
from support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
KILLED_AT = 8
STEPS = 40


def run_example(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(ROOT / "examples" / "grpo_ray.py"), "--json", str(folder / "run.json"), *options]
    # Ray's workers would give way to every other process, and be killed where all of them together need much memory.
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert (folder / "run.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.case("C83")
def test_it_learns_with_a_server_killed_in_mid_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--kill-server-at", str(KILLED_AT), "--steps", str(STEPS), "--plot", str(tmp_path / "run.png"))
    done, run = run_example(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = run["steps"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    # Each step's rollouts were made by the weights that the step before pushed: `Rollouts` refuses others.
    assert [step["rollout_version"] for step in steps] == [f"step-{number}" for number in range(STEPS)]
    assert sum(step["reward"] for step in steps[-5:]) > 4
    both = [len(step["gaps"]) == 2 for step in steps]
    assert all(both[: KILLED_AT - 1])
    assert not both[KILLED_AT - 1]
    assert all(both[-5:])
    # One server ran through, the other is a new one.
    first, last = ({gap["instance_id"] for gap in step["gaps"]} for step in (steps[0], steps[-1]))
    assert (len(first & last), len(first | last)) == (1, 3)
    assert all(gap["mean"] < 1e-5 and gap["max"] < 1e-4 for step in steps for gap in step["gaps"])
    assert (tmp_path / "run.png").stat().st_size > 10_000
    with capsys.disabled():
        print(f"\n{done.stdout.splitlines()[-2]}")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_without_pushes_it_stays_flat_and_the_gap_shows_it(tmp_path: Path) -> None:
    done, run = run_example(tmp_path, "--no-push", "--steps", "12", "--servers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = run["steps"]
    assert {step["rollout_version"] for step in steps} == {"step-0"}
    assert sum(step["reward"] for step in steps[-5:]) < 0.5
    # What the bounds would say of a server that a push does not reach.
    assert min(gap["max"] for step in steps for gap in step["gaps"]) > 1e-3


@pytest.mark.case("C83")
def test_a_loop_of_your_own(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", TOKEN)
    model = AutoModelForCausalLM.from_pretrained(checkpoints.a)
    target = AutoModelForCausalLM.from_pretrained(checkpoints.b).state_dict()
    served = []

    @torch.no_grad()
    def train(model: torch.nn.Module, _: object) -> None:
        names = list(target)
        # Half of the way to B in each of two steps.
        for name in names[len(served) - 1 :: 2]:
            model.get_parameter(name).copy_(target[name])

    def ask() -> None:
        served.append(server.status()["weight_version"])

    run_recipe(
        "A loop of your own",
        server_urls=server.url,
        steps=2,
        model=model,
        train=train,
        ask_servers_for_rollouts=ask,
    )
    assert served[1] == "step-0"
    assert server.status()["weight_version"] == "step-1"
    assert {prompt: server.answer(prompt) for prompt in cold_b} == cold_b
