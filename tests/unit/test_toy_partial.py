"""Partial updates of the toy: exact where the rest is at hand, refused where it is not."""

from __future__ import annotations

import random

import pytest
import torch

from support.toy import Started, Tensors, checkpoint, cold_start, contents, differing, land
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.config import StoragePolicy
from weightpush_server.reload import check_partial, finish_reload
from weightpush_server.reload.coverage import ByteRanges
from weightpush_server.reload.fingerprint import fingerprint
from weightpush_server.reload.opening import is_intact

A, B, C = checkpoint(1), checkpoint(2), checkpoint(3)
#: Groups whose bytes processing leaves where and as they are.
LEFT_ALONE = {
    "decay.weight",
    "embed.weight",
    "first.weight",
    "plain.table",
    "second.weight",
    "sentinel.weight",
    "shared.one",
    "shared.two",
    "table.weight",
    "transposed.weight",
}


def partial_push(live: Started, tensors: Tensors, *, buckets: int = 1) -> None:
    """Push as a worker does: planned, judged, and only then begun."""
    plan = live.plan(tensors)
    written = {id(group): ranges for group, ranges in zip(live.layout.groups, plan.written, strict=True)}
    check_partial(live.layout, lambda group: written[id(group)])
    session = live.begin(plan=plan, partial=True)
    for start in range(buckets):
        land(session, dict(list(tensors.items())[start::buckets]))
    finish_reload(session)


def assert_serves(live: Started, tensors: Tensors) -> None:
    wanted = cold_start(tensors, self_check=False)
    assert differing(contents(live.model), contents(wanted.model)) == []
    assert torch.equal(live.model(), wanted.model())


@pytest.mark.case("C33", "C57")
@pytest.mark.parametrize("pin", [False, True], ids=["", "pinned"])
def test_under_retain_any_subset_is_exact(pin: bool) -> None:
    live = cold_start(A, policy=StoragePolicy.RETAIN, pin=pin)
    expected, chance = dict(A), random.Random(7)
    subsets = [[name] for name in sorted(A)]
    subsets += [chance.sample(sorted(A), chance.randint(1, len(A))) for _ in range(12)]
    for number, names in enumerate(subsets):
        source = checkpoint(100 + number)
        sent = {name: source[name] for name in names}
        partial_push(live, sent, buckets=min(3, len(sent)))
        expected.update(sent)
        assert_serves(live, expected)


def test_under_retain_bytes_that_the_model_holds_anyway_are_not_kept_twice() -> None:
    live = cold_start(A, policy=StoragePolicy.RETAIN)
    kept = {group.name for group in live.layout.groups if group.retained is not None}
    # The fused weights among them: their bytes moved, so what they were loaded to is free and kept.
    moved = {"first.weight", "second.weight"}
    everything = {group.name for group in live.layout.groups}
    assert kept == everything - LEFT_ALONE - {"transposed.weight"} | moved
    live.push(B)
    assert {group.name for group in live.layout.groups if group.retained is not None} >= kept


@pytest.mark.case("C57")
def test_under_scratch_what_processing_left_alone_may_be_left_out() -> None:
    live = cold_start(A)
    expected = dict(A)
    for source, left_out in ((B, LEFT_ALONE), (C, {"table.weight"}), (A, {"embed.weight", "shared.two"})):
        sent = {name: tensor for name, tensor in source.items() if name not in left_out}
        partial_push(live, sent, buckets=2)
        expected.update(sent)
        assert_serves(live, expected)


@pytest.mark.parametrize("name", sorted(A.keys() - LEFT_ALONE))
def test_under_scratch_what_processing_took_may_not_be_left_out(name: str) -> None:
    live = cold_start(A, self_check=False)
    before = fingerprint(live.model)
    with pytest.raises(WeightPushError, match="storage-policy retain") as caught:
        partial_push(live, {key: tensor for key, tensor in B.items() if key != name})
    assert caught.value.code is ErrorCode.PARTIAL_REFUSED
    assert caught.value.details["tensor"] == name
    assert fingerprint(live.model) == before
    live.push(B)
    assert_serves(live, B)


@pytest.mark.parametrize("policy", [StoragePolicy.SCRATCH, StoragePolicy.RETAIN])
def test_after_a_failed_update_only_what_it_did_not_reach_may_be_left_out(policy: StoragePolicy) -> None:
    live = cold_start(A, policy=policy)
    session = live.begin(poison=False, partial=True)
    land(session, {"table.weight": B["table.weight"]})
    missing = {name: tensor for name, tensor in C.items() if name != "table.weight"}
    with pytest.raises(WeightPushError) as caught:
        partial_push(live, missing)
    assert caught.value.details["tensor"] == "table.weight"
    repaired = {name: tensor for name, tensor in C.items() if name != "shared.one"}
    partial_push(live, repaired)
    assert_serves(live, {**C, "shared.one": A["shared.one"]})


def test_a_write_behind_our_back_is_not_taken_for_the_checkpoint() -> None:
    live = cold_start(A, policy=StoragePolicy.RETAIN)
    with torch.no_grad():
        live.model.table.weight[0, 0] += 1
    with pytest.raises(WeightPushError) as caught:
        partial_push(live, {"decay.weight": B["decay.weight"]})
    assert caught.value.details["tensor"] == "table.weight"
    partial_push(live, {"table.weight": B["table.weight"]})
    assert_serves(live, {**A, "table.weight": B["table.weight"]})


def test_a_partial_update_must_write_what_is_gone_completely() -> None:
    """Begun without being judged first, as no worker would: the proof holds by itself."""
    live = cold_start(A)
    session = live.begin(partial=True)
    land(session, {name: tensor for name, tensor in B.items() if name != "prepacked.weight"})
    with pytest.raises(WeightPushError) as caught:
        finish_reload(session)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["tensor"] == "prepacked.weight"


def test_without_copies_from_the_start_the_first_update_must_bring_what_processing_overwrote() -> None:
    live = cold_start(A, policy=StoragePolicy.RETAIN, self_check=False)
    with pytest.raises(WeightPushError) as caught:
        partial_push(live, {"table.weight": B["table.weight"]})
    assert caught.value.code is ErrorCode.PARTIAL_REFUSED
    assert caught.value.details["tensor"] == "scaled.weight"
    partial_push(live, {"table.weight": B["table.weight"], "scaled.weight": B["scaled.weight"]})
    partial_push(live, {"vanishing.weight": C["vanishing.weight"]})
    assert_serves(
        live,
        {
            **A,
            "table.weight": B["table.weight"],
            "scaled.weight": B["scaled.weight"],
            "vanishing.weight": C["vanishing.weight"],
        },
    )


def test_after_dummy_weights_the_first_update_is_complete() -> None:
    live = cold_start(A)
    live.layout.from_dummy = True
    with pytest.raises(WeightPushError, match="dummy weights") as caught:
        check_partial(live.layout, lambda group: group.required)
    assert caught.value.code is ErrorCode.PARTIAL_REFUSED


def test_nothing_is_left_out_where_nothing_is_known() -> None:
    live = cold_start(A)
    for group in live.layout.groups:
        group.landed = None
    assert not any(is_intact(group, None) for group in live.layout.groups)
    with pytest.raises(WeightPushError) as caught:
        check_partial(live.layout, lambda group: ByteRanges())
    assert caught.value.details["tensor"] == live.layout.groups[0].name


def test_parts_of_a_tensor_count_byte_by_byte() -> None:
    live = cold_start(A)
    half = {id(group): ByteRanges([(0, group.nbytes // 2)]) for group in live.layout.groups}
    with pytest.raises(WeightPushError):
        check_partial(live.layout, lambda group: half[id(group)])
