"""A dense server with LoRA adapters: the base is pushed under its plain names, and adapters go on working on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from integration.conftest import PROMPTS as SERVER_PROMPTS
from support.adapters import RANK, make_adapter
from support.engine import ENVIRONMENT, PROMPTS, Engine, engine, push, read, snapshot
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_client import WeightPusher
from weightpush_server.reload.fingerprint import reachable_tensors

OPTIONS = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def _answers(live: Engine, adapter: Path) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = LoRARequest("adapter", 1, str(adapter))
    outputs = live.llm.generate(list(PROMPTS), sampling, use_tqdm=False, lora_request=request)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.usefixtures("_environment")
@pytest.mark.case("C90")
@pytest.mark.parametrize("key", ["qwen3", "llama_tied"])
def test_base_pushes_under_adapters(key: str, tmp_path: Path) -> None:
    a, b = checkpoint(key, 1, tmp_path), checkpoint(key, 2, tmp_path)
    adapter = make_adapter(a, tmp_path / "adapter", seed=5)
    with engine(b, **OPTIONS) as started:
        cold_b, adapted_b = snapshot(started), _answers(started, adapter)
    with engine(a, **OPTIONS) as live:
        cold_a, adapted_a = snapshot(live), _answers(live, adapter)
        assert adapted_a != cold_a.tokens
        assert adapted_a != adapted_b
        for tensors, cold, adapted in (
            (read(b), cold_b, adapted_b),
            (read(a), cold_a, adapted_a),
            (read(a), cold_a, adapted_a),
            (read(b), cold_b, adapted_b),
        ):
            push(live, tensors)
            found = snapshot(live)
            assert found.differing(cold) == []
            assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)
            assert _answers(live, adapter) == adapted
        assert not any("lora" in path for path, _ in reachable_tensors(live.model)), "adapters are nobody's checkpoint"


@pytest.mark.slow
@pytest.mark.case("C90", "C110")
def test_a_server_with_adapters(tmp_path: Path) -> None:
    """Cached blocks of the old base are not given to an adapter's requests, and an adapter is still there."""
    a, b = checkpoint("qwen3", 1, tmp_path), checkpoint("qwen3", 2, tmp_path)
    adapter = make_adapter(a, tmp_path / "adapter", seed=5)
    arguments = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"adapter={adapter}"]

    def look(server: ServerProcess) -> list[str]:
        return [server.answer(prompt, **model) for prompt in SERVER_PROMPTS for model in ({}, {"model": "adapter"}, {})]

    seen: dict[str, list[str]] = {}
    with ServerProcess(b, arguments, folder=tmp_path) as server:
        seen["B"] = look(server)
    with (
        ServerProcess(a, arguments, folder=tmp_path) as server,
        WeightPusher(server.url, transport="http", bucket_bytes=40_000) as pusher,
    ):
        seen["A"] = look(server)
        assert all(mine != theirs for mine, theirs in zip(seen["A"], seen["B"], strict=True))
        for label, directory in (("B", b), ("A", a), ("B", b)):
            pusher.push(directory, weight_version=label)
            answer = server.complete(SERVER_PROMPTS[1], model="adapter").json()
            assert not (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
            assert look(server) == seen[label]
            report = server.client().post("/reload/verify", json={}).json()
            assert report["intact"], report
