"""The benchmark as a command, with tiny models: every way runs, and everything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_measures_every_way_and_writes_all_of_it(tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--models", "moe", "--transports", "http,shm"]
    result = subprocess.run(
        [*command, "--modes", "direct", "--out", str(tmp_path), "--log", str(tmp_path / "log")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert result.returncode == 0, result.stderr + (tmp_path / "log").read_text()[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    moe = found["models"]["moe"]
    assert list(moe["ways"]) == ["floor", "http direct", "shm direct", "layerwise", "file", "per-tensor"]
    assert {name: way["errors"] for name, way in moe["ways"].items() if way["errors"]} == {}
    assert all(way["median"] > 0 for way in moe["ways"].values())
    assert moe["fingerprints_equal"]
    for name in ("http direct", "shm direct"):
        parts = moe["ways"][name]["parts"]
        assert all(parts[part] > 0 for part in ("gather", "land", "PWAL", "proof", "transfer"))
        assert moe["memory"][name]["trainer_extra"] >= 0
    text = (tmp_path / "README.md").read_text()
    assert "| push over shm, direct |" in text
    assert "A smoke test with tiny models" in text
    assert (tmp_path / "moe.png").stat().st_size > 1000
    assert "== worker ==" in (tmp_path / "profile-moe.txt").read_text()
    assert not list(Path("/dev/shm").glob("weightpush-bench-*"))
