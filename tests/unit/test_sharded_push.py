"""Sharded trainers: real ranks over Gloo, which gather bucket by bucket and push as one."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Response

from support import sharded
from support.contract_server import ContractServer
from support.ranks import Ranks
from weightpush_client import PushReport
from weightpush_client.sources import open_source
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec

#: Several buckets, and a bucket boundary inside a layer.
OPTIONS = {"transport": "http", "bucket_bytes": 400}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


@pytest.fixture
def server() -> Iterator[ContractServer]:
    server = ContractServer(sharded.expected_specs())
    yield server
    server.close()


def assert_serves(server: ContractServer, step: int) -> None:
    wanted = sharded.expected(step)
    assert server.status().weight_version == f"step-{step}"
    assert server.weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(server.weights[name].view(torch.uint8), tensor.view(torch.uint8)), name


def assert_all_refused(results: list[Any], code: ErrorCode, text: str) -> None:
    for result in results:
        assert isinstance(result, WeightPushError), result
        assert result.code is code, result
        assert text in result.message, result


@pytest.mark.case("C34", "C63", "C66")
@pytest.mark.parametrize(
    "wrap",
    [
        sharded.fsdp2,
        sharded.fsdp2_after_forward,
        sharded.fsdp1,
        sharded.fsdp1_orig,
        sharded.fsdp1_compiled_checkpointed,
        sharded.ddp,
        sharded.ddp_compiled_inside,
        sharded.zero3_stand_in,
    ],
)
def test_every_wrapper_of_two_ranks_is_pushed_bit_for_bit(pair: Ranks, server: ContractServer, wrap: Any) -> None:
    pair.run(sharded.make_pusher, server.url, OPTIONS)
    first, second = pair.run(sharded.push, wrap, 1)
    assert_serves(server, 1)
    assert first == second
    assert isinstance(first, PushReport)
    assert str(first) == str(second)
    assert first.buckets > 3


@pytest.mark.parametrize("wrap", [sharded.two_dimensional, sharded.hybrid])
def test_meshes_of_two_dimensions(four: Ranks, server: ContractServer, wrap: Any) -> None:
    four.run(sharded.make_pusher, server.url, OPTIONS)
    assert len({report.update_id for report in four.run(sharded.push, wrap, 2)}) == 1
    assert_serves(server, 2)


@pytest.mark.slow
def test_deepspeed_itself(server: ContractServer, tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (it has no wheels: pip install deepspeed)")
    ranks = Ranks(2, tmp_path)
    try:
        ranks.run(sharded.make_pusher, server.url, OPTIONS)
        for step in range(2):
            ranks.run(sharded.push, sharded.zero3, step, timeout_s=280)
            assert_serves(server, step)
    finally:
        ranks.close()


@pytest.mark.case("C35", "C56")
@pytest.mark.parametrize("build", [sharded.packed, sharded.adapted])
def test_sharded_experts_and_adapters_arrive_as_their_checkpoint(pair: Ranks, build: Any) -> None:
    if build is sharded.adapted:
        pytest.importorskip("peft", reason="peft is not installed: pip install peft accelerate")
    source = open_source(build(1))
    names = [spec.name for spec in source.specs()]
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in source.tensors(names)}
    server = ContractServer([TensorSpec.of(name, tensor) for name, tensor in wanted.items()])
    try:
        pair.run(sharded.make_pusher, server.url, {"transport": "http", "bucket_bytes": 100_000})
        pair.run(sharded.push, sharded.fsdp2, 1, -1, 0.0, build)
        assert server.weights.keys() == wanted.keys()
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in wanted.items())
    finally:
        server.close()


@pytest.mark.case("C99")
def test_five_pushes_with_a_rank_that_is_late(pair: Ranks, server: ContractServer) -> None:
    pair.run(sharded.make_pusher, server.url, OPTIONS)
    for step in range(5):
        pair.run(sharded.push, sharded.fsdp2, step, step % 2, 2.0 if step in {2, 3} else 0.0)
        assert_serves(server, step)


def test_a_rank_takes_less_than_two_buckets_beyond_its_shard(pair: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, rows, bucket = 64, 512, 24 * 2**20
    specs = [TensorSpec(name=f"w{number:03}", dtype="bfloat16", shape=(rows, 1024)) for number in range(tensors)]
    server = ContractServer(specs)
    try:
        results = pair.run(sharded.push_measured, tensors, rows, bucket, server.url)
    finally:
        server.close()
    with capsys.disabled():
        for rank, result in enumerate(results):
            print(
                f"\nrank {rank}: shard {result['shard'] / 2**20:.0f} MiB, bucket {bucket / 2**20:.0f} MiB, "
                f"rise {result['rise'] / 2**20:.1f} MiB"
            )
    for result in results:
        assert result["rise"] < 2 * bucket < result["shard"]


def test_a_refusal_reaches_every_rank_and_the_next_push_works(pair: Ranks) -> None:
    server = ContractServer([*sharded.expected_specs(), TensorSpec(name="more", dtype="bfloat16", shape=(1,))])
    try:
        pair.run(sharded.make_pusher, server.url, OPTIONS)
        pair.start(sharded.push, sharded.fsdp2, 1)
        assert_all_refused(pair.results(), ErrorCode.MANIFEST_REJECTED, "more")
        server.manifest.tensors.pop()
        pair.run(sharded.push, sharded.fsdp2, 2)
        assert_serves(server, 2)
    finally:
        server.close()


@pytest.mark.parametrize("wrap", [sharded.fsdp1, sharded.fsdp2, sharded.ddp])
def test_a_server_that_fails_in_mid_stream_ends_every_rank(pair: Ranks, server: ContractServer, wrap: Any) -> None:
    async def fail() -> Response | None:
        if server.calls.count("stream") < 3:
            return None
        error = WeightPushError(ErrorCode.WORKER_LOST, "worker 7 died of the test")
        server.fail(error)
        raise error

    server.hooks["stream"] = fail
    pair.run(sharded.make_pusher, server.url, OPTIONS)
    pair.start(sharded.push, wrap, 1)
    assert_all_refused(pair.results(), ErrorCode.WORKER_LOST, "worker 7 died of the test")
    del server.hooks["stream"]
    pair.run(sharded.push, wrap, 2)
    assert_serves(server, 2)


def test_ranks_read_again_for_the_servers_that_are_left_and_catch_up_together(
    pair: Ranks, server: ContractServer
) -> None:
    bad = ContractServer(sharded.expected_specs())

    async def fail() -> Response | None:
        if bad.calls.count("stream") < 3:
            return None
        error = WeightPushError(ErrorCode.LANDING_FAILED, "no room")
        bad.fail(error)
        raise error

    bad.hooks["stream"] = fail
    try:
        pair.run(sharded.make_pusher, [server.url, bad.url], {**OPTIONS, "on_server_failure": "exclude"})
        first, second = pair.run(sharded.push, sharded.fsdp2, 1)
        assert first == second
        assert [part.url for part in first.servers] == [server.url]
        assert [(part.url, part.code, part.message) for part in second.excluded] == [
            (bad.url, ErrorCode.LANDING_FAILED, "no room")
        ]
        assert_serves(server, 1)
        assert len(server.begins) == 2
        bad.hooks.clear()
        pair.start(sharded.catch_up, sharded.fsdp2, 2)
        assert_all_refused(pair.results(), ErrorCode.WEIGHTS_REJECTED, "not the weights that were pushed last")
        first, second = pair.run(sharded.catch_up, sharded.fsdp2, 1)
        assert [part.url for part in first.servers] == [bad.url]
        assert first == second
        assert_serves(bad, 1)
        pair.start(sharded.push_in_the_background)
        assert_all_refused(pair.results(), ErrorCode.INVALID_REQUEST, "push_async is not for sharded trainers")
    finally:
        bad.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_changed_is_named_before_anybody_gathers(pair: Ranks, server: ContractServer, rank: int) -> None:
    pair.run(sharded.make_pusher, server.url, OPTIONS)
    pair.start(sharded.push_raising, 1, 1)
    results = pair.results()
    assert_all_refused(results, ErrorCode.WEIGHTS_REJECTED, "this rank's part of 'layers.0")
    assert results[0].message.startswith("rank 1: ")
    assert server.status().weight_version == "default"
    pair.run(sharded.push, sharded.fsdp2, 2)
    assert_serves(server, 2)


def test_ranks_with_different_models_are_refused_by_tensor(pair: Ranks, server: ContractServer) -> None:
    pair.run(sharded.make_pusher, server.url, OPTIONS)
    pair.start(sharded.push_unlike, 1)
    results = pair.results()
    assert_all_refused(results, ErrorCode.WEIGHTS_REJECTED, "all ranks must push the same model")
    assert "'embed.weight' float32 [11, 16] here and 'embed.weight' float32 [11, 8] on rank 0" in results[1].message


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "sharded over 2 ranks: make the pusher with process_group="),
        (1, "2 ranks, and the pusher's process_group has 1"),
    ],
)
def test_a_sharded_model_needs_all_its_ranks(pair: Ranks, server: ContractServer, ranks: int, message: str) -> None:
    pair.start(sharded.push_alone, server.url, ranks)
    assert_all_refused(pair.results(), ErrorCode.WEIGHTS_REJECTED, message)
    assert not server.begins


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others(server: ContractServer, tmp_path: Path, victim: int) -> None:
    ranks = Ranks(2, tmp_path)
    reached = asyncio.Event()

    async def hold() -> Response | None:
        if server.calls.count("stream") == 2:
            reached.set()
            await asyncio.sleep(2)
        return None

    server.hooks["stream"] = hold
    try:
        ranks.run(sharded.make_pusher, server.url, OPTIONS)
        ranks.start(sharded.push, sharded.fsdp2, 1)
        while not reached.is_set():
            time.sleep(0.02)
        ranks.kill(victim)
        survivor = ranks.results(60)[1 - victim]
    finally:
        ranks.close()
    # Seen on the ranks' own group, or in the collective that was running.
    assert_all_refused([survivor], ErrorCode.TRAINER_RANK_LOST, "")
    assert server.status().weight_version == "default"


def test_a_rank_that_does_not_come_is_given_up_at_the_deadline_and_new_pushers_work(
    pair: Ranks, server: ContractServer
) -> None:
    pair.run(sharded.make_pusher, server.url, OPTIONS)
    for step in range(2):
        # Before the ranks are connected, and after.
        pair.run(sharded.shorten_deadline, 3.0)
        pair.start(sharded.push_absent, step)
        lost, absent = pair.results(60)
        assert absent is None
        assert_all_refused([lost], ErrorCode.TRAINER_RANK_LOST, "kept the others waiting for 3 s; make a new pusher")
        # The other rank's pusher cannot know, and learns it at its next push.
        pair.start(sharded.push, sharded.fsdp2, step)
        assert_all_refused(pair.results(60), ErrorCode.TRAINER_RANK_LOST, "lost the trainer's other ranks")
        pair.run(sharded.make_pusher, server.url, OPTIONS)
        pair.run(sharded.push, sharded.fsdp2, step)
        assert_serves(server, step)


@pytest.mark.parametrize("connected", [False, True])
def test_control_c_on_rank_0_does_not_wait_for_a_rank_that_is_late(
    server: ContractServer, tmp_path: Path, connected: bool
) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        ranks.run(sharded.make_pusher, server.url, OPTIONS)
        if connected:
            ranks.run(sharded.push, sharded.fsdp2, 1)
        before = server.status().weight_version
        ranks.start(sharded.push_late, 1, 15.0)
        time.sleep(5)
        ranks.signal(0, signal.SIGINT)
        start = time.monotonic()
        interrupted, late = ranks.results(120)
        assert isinstance(interrupted, KeyboardInterrupt)
        assert_all_refused([late], ErrorCode.TRAINER_RANK_LOST, "")
        assert time.monotonic() - start < 100
        assert server.status().weight_version == before
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_rank_that_hangs_while_gathering_is_given_up_at_the_deadline_of_the_trainers_group(
    server: ContractServer, tmp_path: Path
) -> None:
    ranks = Ranks(2, tmp_path, timeout_s=8)
    try:
        ranks.run(sharded.make_pusher, server.url, OPTIONS)
        ranks.run(sharded.push, sharded.fsdp2, 1)
        ranks.start(sharded.push, sharded.fsdp2, 2, 1, 3600.0)
        error = ranks._result(0, time.monotonic() + 120)
        assert_all_refused([error], ErrorCode.TRAINER_RANK_LOST, "could not be gathered from 2 ranks")
        assert server.ended[server.begins[-1].update_id or ""] == "aborted"
    finally:
        ranks.close()
