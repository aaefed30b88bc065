"""One real server for the whole session, and what servers started on the pure checkpoints answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.browser import Browser, find_browser
from support.server import ServerProcess
from support.tiny import PROMPTS, checkpoint

TOKEN = "test-control-token-0123456789"


@dataclass(frozen=True)
class Checkpoints:
    """Two checkpoints of one architecture whose greedy answers differ."""

    a: Path
    b: Path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    return Checkpoints(checkpoint("qwen3", 1, root), checkpoint("qwen3", 2, root))


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    """Engines run in this process."""
    from support.engine import engine_environment  # vLLM, which most of these tests leave to their servers.

    with engine_environment():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file's tiny checkpoints lie."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser without a window."""
    if find_browser() is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium-headless-shell)")
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@dataclass(frozen=True)
class ColdStart:
    """What a server that was started on a checkpoint answers, by prompt, and its fingerprint."""

    answers: dict[str, str]
    fingerprint: str


@pytest.fixture(scope="session")
def cold_start_b(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> ColdStart:
    """A server that was started on B."""
    with ServerProcess(checkpoints.b, folder=tmp_path_factory.mktemp("cold-b")) as server:
        return ColdStart({prompt: server.answer(prompt) for prompt in PROMPTS}, server.status()["fingerprint"])


@pytest.fixture(scope="session")
def cold_b(cold_start_b: ColdStart) -> dict[str, str]:
    """Answers of a server that was started on B."""
    return cold_start_b.answers


@pytest.fixture(scope="session")
def session_server(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """A server started on A, with its answers before any push."""
    with ServerProcess(checkpoints.a, folder=tmp_path_factory.mktemp("server"), token=TOKEN) as server:
        yield server, {prompt: server.answer(prompt) for prompt in PROMPTS}


@pytest.fixture(scope="session")
def cold_a(session_server: tuple[ServerProcess, dict[str, str]], cold_b: dict[str, str]) -> dict[str, str]:
    """Answers of the server that was started on A; they differ from those of B."""
    answers = session_server[1]
    assert all(answers[prompt][:6] != cold_b[prompt][:6] for prompt in PROMPTS)
    return answers


@pytest.fixture
def server(session_server: tuple[ServerProcess, dict[str, str]], checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    """The shared server, serving A at the start of every test."""
    from weightpush_client import WeightPusher

    shared = session_server[0]
    shared.set_faults()
    status = shared.status()
    if status["update"] is not None:
        with shared.client() as client:
            client.post("/reload/abort", json={"update_id": status["update"]["update_id"]})
    if shared.status()["weight_version"] not in ("default", "A") or shared.status()["state"] != "serving":
        with WeightPusher(shared.url, token=TOKEN, transport="http") as pusher:
            pusher.push(checkpoints.a, weight_version="A")
    yield shared
    shared.set_faults()
