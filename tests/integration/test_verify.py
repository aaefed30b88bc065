"""``weightpush verify`` on a real server: what it serves, and whether anybody changed it behind our back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from integration.conftest import TOKEN, Checkpoints
from support.raw import RawUpdate, read_tensors
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_client import WeightPusher
from weightpush_client.cli import app


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch, _no_proxies: None) -> None:
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", TOKEN)


def verify(server: ServerProcess, against: Path | None = None) -> tuple[int, str]:
    arguments = ["verify", server.url, *(["--against", str(against)] if against else [])]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def report(server: ServerProcess, against: Path | None = None) -> dict[str, Any]:
    arguments = ["verify", server.url, "--json", *(["--against", str(against)] if against else [])]
    answer: dict[str, Any] = json.loads(CliRunner().invoke(app, arguments).stdout)
    return answer


def push(server: ServerProcess, directory: Path, version: str, **options: Any) -> None:
    with WeightPusher(server.url, token=TOKEN, **{"transport": "gloo", "bucket_bytes": 40_000, **options}) as pusher:
        pusher.push(directory, weight_version=version)


def save(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.case("C1")
def test_what_is_served_is_told_from_what_is_not(
    server: ServerProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    names = list(read_tensors(checkpoints.b))
    for label, mine, other in (("B", checkpoints.b, checkpoints.a), ("A", checkpoints.a, checkpoints.b)):
        push(server, mine, label)
        code, text = verify(server, mine)
        assert (code, text.splitlines()[0].partition(":")[0], text.splitlines()[-1].partition(":")[0]) == (
            0,
            "intact",
            "equal",
        )
        assert f"version {label}" in text
        code, text = verify(server, other)
        assert code == 1
        assert f"DIFFERENT: {len(names)} tensors" in text
        assert f"\n  {names[0]}: other bytes" in text
        assert "and 5 more" in text
        assert verify(server)[0] == 0
    found = report(server)
    assert found["fingerprint_now"] == server.status()["fingerprint"]
    in_layers = sum(tensor.nbytes for name, tensor in read_tensors(checkpoints.a).items() if "_proj" in name)
    assert found["unseen_bytes"] == in_layers, "vLLM on CPU packs every linear layer away"

    tensors = read_tensors(checkpoints.a)
    name = "model.layers.1.mlp.down_proj.weight"
    nearly = {**tensors, name: tensors[name].clone()}
    nearly[name].view(torch.int16)[3, 4] ^= 1
    found = report(server, save(tmp_path / "nearly", nearly))
    assert [(item["kind"], item["name"]) for item in found["differing"]] == [("digest", name)]
    assert (found["equal"], found["intact"], found["differing_total"]) == (False, True, 1)
    other = {**tensors, "extra": torch.ones(2), "model.norm.weight": torch.ones(3, dtype=torch.bfloat16)}
    del other[name]
    found = report(server, save(tmp_path / "other", other))
    assert {(item["kind"], item["name"]) for item in found["differing"]} == {
        ("missing", name),
        ("unknown", "extra"),
        ("wrong_shape", "model.norm.weight"),
    }
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    assert report(server, save(tmp_path / "wide", wide))["equal"], "a push casts, and so does verify"


def test_the_cold_start_is_known_too(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A tied model: its checkpoint has no head, and one that has it may name the embedding twice."""
    a, b = checkpoint("qwen3_tied", 1, tmp_path), checkpoint("qwen3_tied", 2, tmp_path)
    with ServerProcess(a, folder=tmp_path, token=TOKEN) as server:
        server.answer()
        assert verify(server, a)[0] == 0
        assert verify(server, b)[0] == 1
        tensors = read_tensors(a)
        embedding = tensors["model.embed_tokens.weight"]
        both = save(tmp_path / "both", {**tensors, "lm_head.weight": embedding.clone()})
        apart = save(tmp_path / "apart", {**tensors, "lm_head.weight": embedding + 1})
        for brought in (False, True):
            if brought:
                push(server, both, "both")
            assert verify(server, both)[0] == 0
            assert verify(server, a)[0] == 0
            found = report(server, apart)
            assert [(item["kind"], item["name"]) for item in found["differing"]] == [("digest", "lm_head.weight")]
        push(server, b, "undigested", digest="none")
        code, text = verify(server, b)
        assert code == 1
        assert "not comparable" in text
        assert verify(server)[0] == 0


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_write_behind_our_back_is_found(server: ServerProcess, checkpoints: Checkpoints, name: str) -> None:
    push(server, checkpoints.a, "A")
    server.set_faults(flip=name)
    server.answer()
    code, text = verify(server, checkpoints.a)
    assert code == 1
    assert f"\n  {name}: changed in memory since the commit" in text
    assert "equal: what was committed is" in text
    found = report(server)
    assert found["changed_total"] == 1
    assert found["fingerprint_now"] != found["fingerprint_committed"] == server.status()["fingerprint"]
    server.set_faults()
    push(server, checkpoints.a, "A")
    assert verify(server, checkpoints.a)[0] == 0


def test_there_is_nothing_to_verify_without_whole_weights(server: ServerProcess, checkpoints: Checkpoints) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="torn")
    update.begin().raise_for_status()
    update.stream(0).raise_for_status()
    for _ in range(2):
        code, text = verify(server, checkpoints.b)
        assert code == 1
        assert "not_serving" in text
        update.abort()
    push(server, checkpoints.a, "A")
    assert verify(server, checkpoints.a)[0] == 0


@pytest.mark.case("C24")
def test_who_may_ask_and_what(server: ServerProcess, checkpoints: Checkpoints) -> None:
    assert httpx.post(f"{server.url}/reload/verify", json={}, trust_env=False).status_code == 401
    answer = server.client().post(
        "/reload/verify", json={"tensors": [{"name": "x", "dtype": "bfloat16", "shape": [1]}]}
    )
    assert answer.status_code == 422
    assert "no digest" in answer.json()["error"]["message"]
    assert CliRunner().invoke(app, ["verify", "127.0.0.1:9"]).exit_code == 2


@pytest.mark.slow
def test_every_rank_is_asked(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with ServerProcess(
        checkpoints.a,
        ["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        folder=tmp_path,
        token=TOKEN,
        executor="mp",
    ) as server:
        assert verify(server, checkpoints.a)[0] == 0, "each rank digested half of the checkpoint"
        assert verify(server, checkpoints.b)[0] == 1
        push(server, checkpoints.b, "B")
        assert verify(server, checkpoints.b)[0] == 0
        server.set_faults(flip="model.norm.weight")
        server.answer()
        found = report(server)
        assert [item["worker_rank"] for item in found["changed"]] == [0, 1]
