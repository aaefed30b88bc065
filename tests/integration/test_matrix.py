"""A dozen architectures of the matrix beside those of ``test_reload_engine``; ``make matrix`` runs them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from matrix.run import models

#: Chosen for what they do: biases, transposed or fused checkpoints, weights without a loader, latent attention, state
#: spaces, scores in fp32, tied heads under other names.
MODELS = (
    "phi",
    "phi3",
    "gpt2",
    "bloom",
    "falcon",
    "olmoe",
    "deepseek_v2",
    "gpt_oss",
    "mamba2",
    "qwen3_next",
    "cohere2",
    "glm4_moe",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run the matrix once, in a process of its own: it forks for every model."""
    folder = tmp_path_factory.mktemp("matrix")
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "matrix.run", "--models", ",".join(MODELS), "--no-layerwise"]
    command += ["--checkpoints", str(folder), "--json", str(folder / "rows.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (folder / "rows.json").exists(), done.stderr[-3000:]
    return {row["model"]: row for row in json.loads((folder / "rows.json").read_text())}


@pytest.mark.case("C31", "C32", "C40", "C41", "C56", "C59", "C65", "C91")
@pytest.mark.parametrize("key", MODELS)
def test_a_push_equals_a_cold_start(key: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[key]
    assert row["error"] is None
    assert [(name, differ, tokens, logprobs) for name, differ, tokens, logprobs in row["pushes"]] == [
        ("B", 0, True, True),
        ("A", 0, True, True),
        ("A again", 0, True, True),
    ], row["first_differing"]
    assert row["tensors"] > 10


def test_the_matrix_has_models_of_its_own() -> None:
    known = models()
    assert set(MODELS) <= known.keys()
    assert len(known) >= 34
