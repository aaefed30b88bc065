"""What is shipped: wheel and sdist, what they hold and need, and that they work where nothing else of ours is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from support.documented import ROOT

PACKAGES = ("weightpush_client", "weightpush_protocol", "weightpush_server")


def _run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        **options,  # type: ignore[call-overload] # passed on as they are
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from what git would hand over."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in _run("git", "-C", ROOT, *listed).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    _run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=source)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (path,) = built.glob("*.tar.gz")
    return path


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert top == {*PACKAGES, f"weightpush-{version('weightpush')}.dist-info"}
    # Typed; and what is no module is shipped as well.
    folders = {"weightpush_client": "trainer_client", "weightpush_protocol": "protocol", "weightpush_server": "server"}
    for package, folder in folders.items():
        assert f"{package}/py.typed" in names
        tracked = _run("git", "-C", ROOT, "ls-files", f"{folder}/{package}").split()
        assert {name.removeprefix(f"{folder}/") for name in tracked} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_can_be_built_and_tested_again(sdist: Path) -> None:
    root = f"weightpush-{version('weightpush')}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(root) for name in archive.getnames()}
    assert {"Makefile", "README.md", "requirements/cpu.txt", "tests/conftest.py", "examples/demo.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "dist"))]


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An environment of its own into which one of them was installed; what it needs it sees in this one."""
    folder = tmp_path_factory.mktemp(f"env-{request.param}")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    if request.param == "sdist":
        # To build it, it needs hatchling at once.
        (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    _run(python, "-m", "pip", "install", *options, wheel if request.param == "wheel" else sdist)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_it_works_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    printed = _run(installed / "bin" / "weightpush", "--version", env=_clean(), cwd=tmp_path)
    assert printed.startswith(f"weightpush {version('weightpush')}, protocol ")
    program = f"import {', '.join(PACKAGES)}; print(*[m.__file__ for m in ({', '.join(PACKAGES)})])"
    for place in _run(installed / "bin" / "python", "-c", program, env=_clean(), cwd=tmp_path).split():
        assert place.startswith(str(installed))


def test_vllm_finds_the_plugins(installed: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import distribution\n"
        "for point in distribution('weightpush').entry_points: point.load(); print(point.group)"
    )
    groups = _run(installed / "bin" / "python", "-c", program, env=_clean(), cwd=tmp_path).split()
    assert {"console_scripts", "vllm.general_plugins", "vllm.endpoint_plugins"} <= set(groups)


def test_a_trainer_needs_neither_vllm_nor_a_servers_libraries(wheel: Path) -> None:
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    needed = re.findall(
        r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", zipfile.ZipFile(wheel).read(metadata).decode(), re.MULTILINE
    )
    assert set(needed) == {"torch", "pydantic", "httpx", "safetensors", "xxhash", "typer", "rich"}


def test_the_public_surface() -> None:
    """What a minor version may add to, and only a major one take from."""
    import weightpush_client
    import weightpush_client.ray

    assert set(weightpush_client.__all__) >= {
        "Deadlines",
        "DigestKind",
        "ErrorCode",
        "ExcludedServer",
        "InFlight",
        "OnServerFailure",
        "PhaseSeconds",
        "PushError",
        "PushHandle",
        "PushPhase",
        "PushProgress",
        "PushReport",
        "ServerReport",
        "Status",
        "UpdateMode",
        "WeightPushError",
        "WeightPusher",
        "Weights",
    }
    assert "ServerFleet" in weightpush_client.ray.__all__
