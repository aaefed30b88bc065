"""Every command of README and docs that can run on one machine, as it stands there, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from integration.conftest import TOKEN, Checkpoints
from support.contract_server import ContractServer
from support.documented import HERE, PYTHON, ROOT, Block, blocks, run_here
from support.raw import read_tensors
from support.server import ServerProcess
from weightpush_protocol.manifest import TensorSpec

#: Ends by itself only when somebody presses Ctrl-C.
_FOLLOWS = "weightpush watch"


@dataclass(frozen=True)
class Place:
    """What names in the docs stand for, and the environment that commands find."""

    server: ServerProcess
    names: dict[str, str]
    environment: dict[str, str]
    folder: Path

    def real(self, text: str) -> str:
        """Return ``text`` with names of hosts, models and directories exchanged for real ones."""
        for name, meant in self.names.items():
            text = text.replace(name, meant)
        return text

    def run(self, command: str) -> str:
        """Run a command of the docs; return what it prints. Raises ``AssertionError`` where it fails."""
        follows = command.startswith(_FOLLOWS)
        shell = ["timeout", "--signal=INT", "5"] if follows else []
        done = subprocess.run(
            [*shell, "bash", "-euo", "pipefail", "-c", f"{'exec ' * follows}{self.real(command)}"],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        # 124: `timeout` had to end it.
        assert done.returncode in ({124, 130} if follows else {0}), f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def place(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("documented")
    shared = folder / "shared"
    (shared / "step-100").mkdir(parents=True)
    for file in checkpoints.b.iterdir():
        shutil.copy(file, shared / "step-100")
    other = ContractServer(
        [TensorSpec.of(name, tensor) for name, tensor in read_tensors(checkpoints.b).items()], token=TOKEN
    )
    arguments = ["--keep-previous", "--reload-root", str(shared), "--served-model-name", "Qwen/Qwen3-0.6B"]
    with ServerProcess(checkpoints.a, arguments, folder=folder, token=TOKEN) as server:
        address = server.url.removeprefix("http://")
        names = {
            "gpu-1:8000": address,
            "gpu-2:8000": other.url.removeprefix("http://"),
            "localhost:8000": address,
            "./checkpoint": str(checkpoints.b),
            "/shared": str(shared),
        }
        for tool in ("weightpush", "python"):
            path = folder / "bin" / tool
            path.parent.mkdir(exist_ok=True)
            module = " -m weightpush_client" if tool == "weightpush" else ""
            path.write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
            path.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "WEIGHTPUSH_CONTROL_TOKEN": TOKEN,
        }
        yield Place(server, names, environment, folder)
    other.close()


def _commands(start: str) -> list[tuple[Block, str]]:
    return [(block, command) for block, command in run_here() if command.startswith(start)]


def test_nothing_is_left_out() -> None:
    starts = ("weightpush ", "curl ", "H=", "python -m benchmarks", "export ", "make ")
    assert [command for _, command in run_here() if not command.startswith(starts)] == []


@pytest.mark.parametrize("page", sorted({block.page for block, _ in _commands("weightpush ")}))
def test_the_command_line(place: Place, page: str, checkpoints: Checkpoints) -> None:
    """In the order of the page: what goes back needs something before it."""
    for block, command in _commands("weightpush "):
        if block.page == page and not command.startswith("weightpush serve Qwen"):
            printed = place.run(command)
            if command.startswith("weightpush status"):
                assert "serving" in printed
    assert place.server.status()["state"] == "serving"


@pytest.mark.parametrize("command", [command for _, command in _commands("curl ")])
def test_curl(place: Place, command: str) -> None:
    assert "null" not in place.run(command).splitlines()[:1]


def test_a_push_with_curl(place: Place, checkpoints: Checkpoints) -> None:
    (script,) = (command for _, command in _commands("H="))
    for file in checkpoints.b.glob("*.safetensors"):
        shutil.copy(file, place.folder)
    printed = place.run(script)
    assert '"weight_version":"v2"' in printed
    assert place.server.status()["weight_version"] == "v2"


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_a_client_of_sockets_and_httpx_alone(place: Place, checkpoints: Checkpoints, transport: str) -> None:
    from weightpush_client import WeightPusher

    with WeightPusher(place.server.url, token=TOKEN) as pusher:
        expected = pusher.push(checkpoints.b, weight_version="B").servers[0].fingerprint
        pusher.push(checkpoints.a, weight_version="A")
    assert place.server.status()["fingerprint"] != expected
    program = ROOT / "examples" / "plain_client.py"
    assert not {"torch", "weightpush_client", "weightpush_protocol"} & {
        line.split()[1].partition(".")[0]
        for line in program.read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    label = f"plain-{transport}"
    command = f"python {program} {checkpoints.b} {place.server.url} --version {label} --transport {transport}"
    assert label in place.run(command)
    status = place.server.status()
    assert (status["weight_version"], status["fingerprint"]) == (label, expected)
    assert status["last_update"]["transport"] == transport


def test_a_client_of_sockets_and_httpx_is_refused_by_name(place: Place, tmp_path: Path) -> None:
    program = ROOT / "examples" / "plain_client.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path, place.server.url, "--version", "none"],
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "lacks" in done.stderr


@pytest.mark.parametrize(("page", "text"), [(page, text) for page, text, file in PYTHON if file == HERE])
def test_python(place: Place, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, page: str, text: str) -> None:
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", TOKEN)
    (block,) = [block for block in blocks("python") if block.page == page and text in block.text]
    from weightpush_client import WeightPusher

    trained: list[object] = []
    names = {
        "steps": 2,
        "model": read_tensors(checkpoints.b),
        "train": lambda *weights: trained.append(weights),
        "ask_servers_for_rollouts": list,
        "server_urls": [place.server.url],
        "urls": [place.server.url],
        "step": 7,
        "WeightPusher": WeightPusher,
        "torch": torch,
    }
    exec(compile(place.real(block.text), page, "exec"), names)
    if page == "docs/trainers.md":
        names["pusher"].close()  # type: ignore[attr-defined] # the block made it
        assert names["report"].servers[0].weight_version == "step-7"  # type: ignore[attr-defined] # as above
        assert place.server.status()["weight_version"] == "step-7"
    else:
        assert len(trained) == 2
        assert place.server.status()["weight_version"] == "step-1"


@pytest.mark.parametrize("command", [command for _, command in _commands("export ")])
def test_a_token(place: Place, command: str) -> None:
    assert len(place.run(f"{command}\necho $WEIGHTPUSH_CONTROL_TOKEN").strip()) == 48


@pytest.mark.parametrize("command", [command for _, command in _commands("python -m benchmarks")])
def test_the_model_of_fleets(place: Place, command: str) -> None:
    assert "servers" in place.run(command)


def test_the_plan_of_a_campaign(place: Place) -> None:
    (command,) = (command for _, command in _commands("make faults"))
    options = command.partition('"')[2].partition('"')[0]
    printed = subprocess.run(
        [sys.executable, "-m", "faults.run", *options.split()],
        env={**place.environment, "PYTHONPATH": f"{ROOT / 'tests'}:{place.environment['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert len(printed.stdout.splitlines()) >= 500


@pytest.mark.slow
def test_the_demo(place: Place) -> None:
    """`make demo` sets up and runs this."""
    environment = {name: value for name, value in place.environment.items() if name != "WEIGHTPUSH_CONTROL_TOKEN"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The whole story took" in done.stdout
