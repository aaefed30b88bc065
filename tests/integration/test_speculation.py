"""Servers that speculate: a push changes the target, and only the target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.engine import ENVIRONMENT, engine, push, read, snapshot
from support.tiny import checkpoint
from weightpush_server.reload.fingerprint import fingerprint, tensor_objects
from weightpush_server.reload.layout import find_layout


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_environment")
@pytest.mark.case("C109")
def test_a_draft_model_keeps_its_weights(tmp_path: Path) -> None:
    """It is loaded and recorded second, by the same loader, and no push touches it."""
    a, b, draft = (checkpoint("qwen3", seed, tmp_path) for seed in (1, 2, 3))
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    with engine(b) as started:
        cold_b = snapshot(started)
    with engine(a, speculative_config=speculation) as live:
        core = live.llm.llm_engine.engine_core.engine_core
        drafter = core.model_executor.driver_worker.worker.model_runner.drafter.model
        layouts = (find_layout(live.model), find_layout(drafter))
        assert None not in layouts
        assert layouts[0] is not layouts[1]
        cold_a = snapshot(live)
        drafted = fingerprint(drafter)
        objects = dict(tensor_objects(drafter))
        for tensors, cold in ((read(b), cold_b), (read(a), cold_a), (read(b), cold_b)):
            push(live, tensors)
            found = snapshot(live)
            assert found.differing(cold) == []
            assert found.tokens == cold.tokens
            assert fingerprint(drafter) == drafted
            now = dict(tensor_objects(drafter))
            assert now.keys() == objects.keys()
            assert all(now[path] is tensor for path, tensor in objects.items())


@pytest.mark.case("C109")
def test_ngram_speculation(tmp_path: Path) -> None:
    """In a process of its own: what this method imports keeps vLLM from starting another engine beside it."""
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    a, b = (checkpoint("qwen3", seed, tmp_path) for seed in (1, 2))
    done = subprocess.run(
        [sys.executable, __file__, str(a), str(b)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"B": [[], True, True], "A": [[], True, True]}


def _ngram(a: Path, b: Path) -> None:
    with engine(b) as started:
        cold_b = snapshot(started)
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    with engine(a, speculative_config=speculation) as live:
        cold_a = snapshot(live)
        outcome = {}
        for _ in range(2):
            for label, directory, cold in (("B", b, cold_b), ("A", a, cold_a)):
                push(live, read(directory))
                found = snapshot(live)
                outcome[label] = [found.differing(cold), found.tokens == cold.tokens, cold_a.tokens != cold_b.tokens]
    print(json.dumps(outcome))


if __name__ == "__main__":
    _ngram(*map(Path, sys.argv[1:]))
