"""Tiny random checkpoints of many architectures, made on the spot and kept for the test session."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

#: What tests ask; the greedy answers of checkpoints with different seeds differ from their first tokens on.
PROMPTS = ("weights", "a much longer prompt that fills several cache blocks " * 3, "x")

_ROOT = Path(__file__).resolve().parents[2]


@cache
def tiny_model() -> ModuleType:
    """Return ``examples/tiny_model.py`` as a module; it is an example, so no package holds it."""
    spec = importlib.util.spec_from_file_location("weightpush_tiny_model", _ROOT / "examples" / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def configurations() -> dict[str, dict[str, Any]]:
    """Return ``key -> {"model_type", "config"}`` of every tiny model."""
    configurations: dict[str, dict[str, Any]] = json.loads((_ROOT / "tests" / "data" / "tiny_models.json").read_text())
    return configurations


def checkpoint(key: str, seed: int, root: Path, entry: dict[str, Any] | None = None) -> Path:
    """Return a checkpoint directory of model ``key``, made below ``root`` on the first call.

    ``entry`` describes a model that is not among the tiny ones.
    Safe against a second process that makes the same one: each builds its own and renames it into place.
    """
    target = root / f"{key}-{seed}"
    if target.is_dir():
        return target
    entry = entry or configurations()[key]
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=root, prefix=f".{key}-{seed}-"))
    tiny_model().make_tiny_checkpoint(building, config=entry["config"], model_type=entry["model_type"], seed=seed)
    try:
        os.rename(building, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(building)
    return target
