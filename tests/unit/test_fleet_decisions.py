"""Whose failure it was, who is behind, which checkpoint counts: decided without asking anybody."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from weightpush_client.align import agreed_manifest, align, majority
from weightpush_client.catch_up import LastPush, catch_up_target, stale_for_partial, version_line
from weightpush_client.policy import LOST_SERVERS, Witness, culprits, lost_by_silence, suspects
from weightpush_client.report import PushError
from weightpush_client.sources import open_source
from weightpush_client.transport import Link, choose_transport
from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import ManifestAnswer
from weightpush_protocol.state import ServerState
from weightpush_protocol.status import LastError, LastUpdate, Status, WorkerStatus

UPDATE = "the-update"
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def status(
    *,
    state: ServerState = ServerState.SERVING,
    version: str = "v1",
    instance: str = "i1",
    error: tuple[ErrorCode, str | None] | None = None,
    buckets: Sequence[int] = (),
    fingerprint: str | None = None,
    committed_s: int | None = None,
) -> Status:
    last_error = None
    if error is not None:
        last_error = LastError(code=error[0], message=f"own {error[0].value}", update_id=error[1], at=NOW)
    last_update = None
    if committed_s is not None:
        last_update = LastUpdate(
            update_id="u",
            weight_version=version,
            mode="direct",
            transport="http",
            digest="wp64",
            tensors=1,
            bytes=1,
            seconds=1,
            pause_seconds=1,
            finished_at=NOW.replace(second=committed_s),
        )
    return Status(
        protocol=PROTOCOL_VERSION,
        instance_id=instance,
        state=state,
        serving=state.serving,
        weight_version=version,
        last_error=last_error,
        last_update=last_update,
        fingerprint=fingerprint,
        workers=[
            WorkerStatus(rank=rank, pid=1, device="cpu", weight_version=version, buckets_done=done)
            for rank, done in enumerate(buckets)
        ],
    )


def witness(url: str, **options: Any) -> Witness:
    return Witness(url, "i1", status(**options))


GONE = PushError(ErrorCode.UNREACHABLE, "cannot connect", server="a")
BROKE = WeightPushError(ErrorCode.TRANSPORT_FAILED, "worker rank 1 went away")


# whose failure


@pytest.mark.parametrize(
    ("witnesses", "named"),
    [
        ([Witness("a", "i1", GONE), witness("b")], {"a": ErrorCode.UNREACHABLE}),
        ([Witness("a", "i1", OSError("no route")), witness("b")], {"a": ErrorCode.UNREACHABLE}),
        ([witness("a", instance="i2"), witness("b")], {"a": ErrorCode.WORKER_LOST}),
        ([witness("a", error=(ErrorCode.LANDING_FAILED, UPDATE)), witness("b")], {"a": ErrorCode.LANDING_FAILED}),
        # Its engine is dead, whatever ran.
        ([witness("a", error=(ErrorCode.WORKER_LOST, None)), witness("b")], {"a": ErrorCode.WORKER_LOST}),
        # All of them at once.
        (
            [Witness("a", "i1", GONE), witness("b", error=(ErrorCode.DIGEST_MISMATCH, UPDATE)), witness("c")],
            {"a": ErrorCode.UNREACHABLE, "b": ErrorCode.DIGEST_MISMATCH},
        ),
        # What an update of before left behind is no evidence.
        ([witness("a", error=(ErrorCode.LANDING_FAILED, "another")), witness("b")], {}),
        # That the others went away is nobody's own failure.
        (
            [
                witness("a", error=(code, UPDATE))
                for code in (ErrorCode.TRANSPORT_FAILED, ErrorCode.RENDEZVOUS_FAILED, ErrorCode.ABORTED)
            ],
            {},
        ),
        # Nobody else can lose it for a server, but the trainer: that is asked first.
        ([witness("a", error=(ErrorCode.LEASE_LOST, UPDATE)), witness("b")], {"a": ErrorCode.LEASE_LOST}),
    ],
)
def test_a_server_is_a_culprit_by_its_own_account(witnesses: list[Witness], named: dict[str, ErrorCode]) -> None:
    found = culprits(BROKE, UPDATE, witnesses)
    assert {url: error.code for url, error in found.items()} == named
    assert {error.server for error in found.values()} == set(named)


def test_who_answered_with_a_failure_is_a_culprit_unless_it_is_a_consequence() -> None:
    refused = PushError(ErrorCode.RELOAD_REFUSED, "online quantization", server="a")
    assert culprits(refused, UPDATE, [witness("a"), witness("b")]) == {"a": refused}
    victim = PushError(ErrorCode.TRANSPORT_FAILED, "the trainer closed the connection", server="b")
    witnesses = [Witness("a", "i1", GONE), witness("b", error=(ErrorCode.TRANSPORT_FAILED, UPDATE))]
    assert list(culprits(victim, UPDATE, witnesses)) == ["a"]


def test_without_a_culprit_the_lost_the_silent_the_slowest_and_the_speaker_are_suspects_in_this_order() -> None:
    witnesses = [witness("a", buckets=[3, 2]), witness("b", buckets=[3, 3]), witness("c", buckets=[3])]
    details = {LOST_SERVERS: ["b"]}
    speaker = PushError(ErrorCode.TRANSPORT_FAILED, "lost", server="c", details=details)
    assert list(suspects(speaker, witnesses, {"a"})) == ["b"]
    # The first to report that its connections broke is rarely the one that broke them.
    victim = PushError(ErrorCode.TRANSPORT_FAILED, "lost", server="c")
    assert list(suspects(victim, witnesses, {"b"})) == ["b"]
    assert list(suspects(victim, witnesses)) == ["a"]
    alike = [witness("a", buckets=[3]), witness("c", buckets=[3])]
    assert list(suspects(victim, alike)) == ["c"]
    slow = suspects(BROKE, witnesses)
    assert {url: (error.server, error.code) for url, error in slow.items()} == {"a": ("a", ErrorCode.TRANSPORT_FAILED)}
    # All equally far: nothing says that another choice of servers would help.
    assert suspects(BROKE, [witness("a", buckets=[3]), witness("b", buckets=[3])]) == {}
    assert suspects(WeightPushError(ErrorCode.INVALID_REQUEST, "no version"), witnesses) == {}


def test_a_lost_lease_is_found_wherever_it_shows() -> None:
    lost = PushError(ErrorCode.LEASE_LOST, "silent", server="a")
    assert lost_by_silence(lost, UPDATE, [])
    assert lost_by_silence(BROKE, UPDATE, [witness("a"), witness("b", error=(ErrorCode.LEASE_LOST, UPDATE))])
    # Another update's, or no lost lease at all.
    assert not lost_by_silence(BROKE, UPDATE, [witness("a", error=(ErrorCode.LEASE_LOST, "another"))])
    assert not lost_by_silence(
        BROKE, UPDATE, [witness("a", error=(ErrorCode.ABORTED, UPDATE)), Witness("b", "i", GONE)]
    )


def test_ranks_of_a_link_are_told_as_servers() -> None:
    link = Link("gloo", (0, 1), (), ("a", "b", "b"))
    for details, lost in (
        ({"peer_rank": 3}, ["b"]),
        ({"missing_ranks": [1, 2, 3]}, ["a", "b"]),
        ({"peer_rank": 0}, None),
        ({"missing_ranks": []}, None),
        ({}, None),
    ):
        error = WeightPushError(ErrorCode.TRANSPORT_FAILED, "x", details=dict(details))
        link.note_lost(error)
        assert error.details.get(LOST_SERVERS) == lost


# which checkpoint


def manifest(*names: str) -> ManifestAnswer:
    return ManifestAnswer(tensors=[TensorSpec(name=name, dtype="bfloat16", shape=(2,)) for name in names])


def test_the_odd_one_out_is_left_out_by_name_and_without_a_majority_nobody_is() -> None:
    pairs = [("a", manifest("x", "y")), ("b", manifest("x")), ("c", manifest("y", "x"))]
    expected, odd = majority(pairs)
    assert expected == pairs[0][1]
    assert list(odd) == ["b"]
    assert "first at 'y': a expects bfloat16 [2], b expects no such tensor" in odd["b"].message
    for tied in (pairs[:2], [*pairs, ("d", manifest("x"))]):
        with pytest.raises(WeightPushError, match="different checkpoints, first at 'y'"):
            majority(tied)
    with pytest.raises(WeightPushError, match="different checkpoints, first at 'y'"):
        agreed_manifest(pairs)
    assert majority(pairs[:1]) == (pairs[0][1], {})


@pytest.mark.case("C108")
def test_five_thousand_names_are_mapped_in_less_than_a_second() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.w{kind}"
        for layer in range(28)
        for expert in range(60)
        for kind in "123"
    ]
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=(1,)) for name in names]
    expected = ManifestAnswer(tensors=specs)
    tensor = torch.zeros(1)
    source = open_source({f"module.{name.replace('.mlp', '._orig_mod.mlp')}": tensor.clone() for name in names})
    seconds = []
    for _ in range(3):  # The machine may be busy with something else.
        start = time.process_time()
        agreed, odd = majority([(url, expected) for url in "abc"])
        outgoing = align(source, agreed)
        seconds.append(time.process_time() - start)
    assert odd == {}
    assert [item.sent.name for item in outgoing] == names
    assert len(names) > 5000
    assert min(seconds) < 1


# who is behind


LAST = LastPush("v1", {"x": "1", "y": "2"}, True, {"i1": "f"})


@pytest.mark.parametrize(
    ("given", "served"),
    [
        (status(fingerprint="f"), True),
        (status(state=ServerState.STAGING, fingerprint="f"), True),
        (status(instance="another", fingerprint="f"), True),
        # Whoever labelled it may have meant other bytes.
        (status(instance="another", fingerprint="of other workers"), False),
        (status(instance="another"), False),
        # Somebody else's bytes under the same label.
        (status(fingerprint="g"), False),
        (status(version="v0"), False),
        (status(state=ServerState.FAILED), False),
        (status(state=ServerState.AWAITING_WEIGHTS), False),
        (status(state=ServerState.UPDATING), False),
    ],
)
def test_who_serves_what_was_pushed_last(given: Status, served: bool) -> None:
    assert LAST.is_served_by(given) is served
    assert list(stale_for_partial(LAST, [given])) == ([] if served else [0])
    assert stale_for_partial(None, [given]) == {}


def test_servers_with_several_versions_are_no_base_for_a_partial_push() -> None:
    behind = stale_for_partial(None, [status(version=version) for version in ("v0", "v1", "v1")])
    assert {place: error.code for place, error in behind.items()} == {0: ErrorCode.PARTIAL_REFUSED}
    assert "'v0' and most have 'v1'" in behind[0].message


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ({"x": "1", "y": "3"}, "'y' differs"),
        ({"x": "1"}, "'y' is missing"),
        ({"x": "1", "y": "2", "z": "3"}, "'z' was not pushed"),
    ],
)
def test_other_weights_are_told_by_their_first_tensor(digests: dict[str, str], message: str) -> None:
    LAST.check_same({"y": "2", "x": "1"})
    with pytest.raises(PushError, match=message) as refused:
        LAST.check_same(digests)
    assert refused.value.code is ErrorCode.WEIGHTS_REJECTED


def test_partial_pushes_change_what_is_known_and_do_not_complete_it() -> None:
    after = LastPush.after(LAST, "v2", {"y": "9"}, partial=True, fingerprints={"i2": "g"})
    assert (after.digests, after.complete, after.fingerprints) == ({"x": "1", "y": "9"}, True, {"i2": "g"})
    assert catch_up_target(after) is after
    only_part = LastPush.after(None, "v1", {"y": "9"}, partial=True, fingerprints={})
    with pytest.raises(PushError, match="was a partial push"):
        catch_up_target(only_part)
    assert LastPush.after(only_part, "v2", {"x": "1"}, partial=False, fingerprints={}).complete
    with pytest.raises(PushError, match="without digests"):
        catch_up_target(LastPush("v1", {}, True))
    with pytest.raises(PushError, match="pushed nothing yet"):
        catch_up_target(None)
    assert LAST.joined_by({"i3": "h"}).fingerprints == {"i1": "f", "i3": "h"}


@pytest.mark.parametrize(
    ("results", "line"),
    [
        ([status(version="v2")], "serves v2"),
        ([status(version="v2"), status(version="v2")], "all 2 serve v2"),
        # Not what most serve, but what was committed last.
        (
            [
                status(version="v1", committed_s=1),
                status(version="v1", committed_s=2),
                status(version="v2", committed_s=3),
            ],
            "1 of 3 serve v2; behind: s0 (serves v1), s1 (serves v1)",
        ),
        (
            [status(version="v2"), status(state=ServerState.FAILED, version="v2"), GONE],
            "1 of 3 serve v2; behind: s1 (failed), s2 (no answer)",
        ),
        ([status(state=ServerState.AWAITING_WEIGHTS), GONE], "no server serves"),
    ],
)
def test_the_status_of_a_fleet_in_one_line(results: list[Status | WeightPushError], line: str) -> None:
    assert version_line([(f"s{number}", result) for number, result in enumerate(results)]) == line


def test_auto_is_decided_for_each_server() -> None:
    def having(*kinds: list[str]) -> Status:
        workers = [
            WorkerStatus(rank=rank, pid=1, device="cpu", weight_version="v", transports=kind)
            for rank, kind in enumerate(kinds)
        ]
        return status().model_copy(update={"workers": workers})

    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    both = having(["nccl", "gloo", "http"], ["nccl", "gloo", "http"])
    mixed = having(["nccl", "gloo", "http"], ["gloo", "http"])
    assert [choose_transport("auto", both, device) for device in (cuda, cpu)] == ["nccl", "gloo"]
    assert [choose_transport("auto", mixed, device) for device in (cuda, cpu)] == ["gloo", "gloo"]
    assert choose_transport("auto", having(["http"]), cuda) == "http"
    assert choose_transport("auto", having(), cuda) == "http"
    assert choose_transport("http", both, cuda) == "http"
