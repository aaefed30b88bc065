"""Trainers as people run them, against a real server: what arrives is what their saved checkpoint would have been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from integration.conftest import TOKEN
from support import sharded
from support.ranks import Ranks
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_client import WeightPusher

BUCKET_BYTES = 100_000


@pytest.fixture(scope="module")
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a mixture of experts, which transformers packs in memory."""
    model = checkpoint("qwen3_moe", 1, tmp_path_factory.mktemp("checkpoints"))
    with ServerProcess(model, folder=tmp_path_factory.mktemp("moe"), token=TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def saved_print(moe_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fingerprints that saved checkpoints give: of the plain model, and of one with adapters merged."""
    pytest.importorskip("peft", reason="peft is not installed: pip install peft accelerate")
    models = {"packed": sharded.packed(1), "adapted": sharded.adapted(1).merge_and_unload()}
    prints = {}
    with WeightPusher(moe_server.url, token=TOKEN, transport="http") as pusher:
        for name, model in models.items():
            folder: Path = tmp_path_factory.mktemp(name)
            model.to(torch.bfloat16).save_pretrained(folder)
            (server,) = pusher.push(folder, weight_version=f"saved-{name}").servers
            prints[name] = server.fingerprint
    assert prints["packed"] != prints["adapted"]
    return prints


@pytest.mark.case("C35", "C54", "C56")
@pytest.mark.parametrize("name", ["packed", "adapted"])
def test_a_model_in_memory_is_pushed_as_its_checkpoint(
    moe_server: ServerProcess, saved_print: dict[str, str], name: str
) -> None:
    with WeightPusher(moe_server.url, token=TOKEN, transport="gloo", bucket_bytes=BUCKET_BYTES) as pusher:
        (server,) = pusher.push(getattr(sharded, name)(1), weight_version=f"memory-{name}").servers
    assert server.fingerprint == saved_print[name]
    assert moe_server.status()["weight_version"] == f"memory-{name}"


@pytest.mark.case("C56", "C63")
def test_two_ranks_push_five_times_and_one_is_late(
    moe_server: ServerProcess, saved_print: dict[str, str], pair: Ranks
) -> None:
    pair.run(sharded.make_pusher, moe_server.url, {"transport": "gloo", "bucket_bytes": BUCKET_BYTES}, TOKEN)
    prints = []
    for number in range(5):
        build = sharded.adapted if number % 2 else sharded.packed
        late = 2.0 if number in {1, 2} else 0.0
        first, second = pair.run(sharded.push, sharded.fsdp2, 1, number % 2, late, build)
        assert first == second
        assert first.transport == "gloo"
        prints.append(first.servers[0].fingerprint)
    wanted = [saved_print["adapted" if number % 2 else "packed"] for number in range(5)]
    assert prints == wanted
    assert moe_server.status()["weight_version"] == "step-1"
