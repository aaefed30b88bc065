"""Leases of several servers, pushers closed in mid-push, who may take part, and for how long: real HTTP servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from support.contract_server import ReceiverProcess
from unit.test_client_fleet import MakeServer, make, pusher_for, slow
from unit.test_client_push import assert_arrived, make_weights, our_threads
from weightpush_client import Deadlines, ErrorCode, PushError, PushProgress, delivery, http
from weightpush_protocol import PROTOCOL_VERSION, limits
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.versions import mismatch

__all__ = ["make"]  # A fixture.


def sleeping(seconds: float) -> Callable[[], Awaitable[None]]:
    async def sleep() -> None:
        await asyncio.sleep(seconds)

    return sleep


# leases


@pytest.mark.parametrize("route", ["begin", "stream", "prepare"])
def test_a_server_keeps_its_lease_while_another_is_slow(make: MakeServer, route: str) -> None:
    quick, late = make(), make()
    # Long enough that a busy machine does not stop this process for half a lease.
    late.hooks[route] = sleeping(4.0 if route != "stream" else 1.0)
    with pusher_for(quick, late, deadlines=Deadlines(lease_s=1.6)) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    assert quick.calls.count("keep") > 2
    assert {server.status().weight_version for server in (quick, late)} == {"v1"}


def test_a_push_that_is_quicker_than_its_lease_asks_nobody_to_keep_it(make: MakeServer) -> None:
    first, second = make(), make()
    with pusher_for(first, second) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    assert "keep" not in [*first.calls, *second.calls]


@pytest.mark.parametrize("policy", ["abort", "exclude"])
def test_a_trainer_that_is_stuck_loses_its_leases_and_blames_nobody(make: MakeServer, policy: str) -> None:
    servers = make(), make()

    def stuck(progress: PushProgress) -> None:
        if progress.bucket == 2:
            time.sleep(1.5)

    with pusher_for(*servers, on_server_failure=policy, deadlines=Deadlines(lease_s=0.5)) as pusher:
        with pytest.raises(PushError) as lost:
            pusher.push(make_weights(), weight_version="v1", progress=stuck)
        assert lost.value.code is ErrorCode.LEASE_LOST
        for server in servers:
            assert len(server.begins) == 1
            assert server.status().weight_version == "default"
        pusher.push(make_weights(), weight_version="v2")


def test_a_server_that_loses_its_lease_alone_is_left_out(make: MakeServer) -> None:
    deaf, late = make(), make()

    async def crowded() -> None:
        raise WeightPushError(ErrorCode.TOO_MANY_CALLS, "later")

    deaf.hooks["keep"] = crowded
    late.hooks["begin"] = sleeping(4.0)
    with pusher_for(deaf, late, on_server_failure="exclude", deadlines=Deadlines(lease_s=1.6)) as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
    assert deaf.calls.count("keep") > 1
    assert [(found.url, found.code) for found in report.excluded] == [(deaf.url, ErrorCode.LEASE_LOST)]
    assert_arrived(late)


# errors of callbacks


def test_an_error_of_a_callback_is_the_trainers_whatever_it_says(make: MakeServer) -> None:
    servers = make(), make()
    own = PushError(ErrorCode.LANDING_FAILED, "from a callback", server=servers[0].url)

    def progress(step: PushProgress) -> None:
        if step.bucket == 2:
            raise own

    with pusher_for(*servers, on_server_failure="exclude") as pusher, pytest.raises(PushError) as raised:
        pusher.push(make_weights(), weight_version="v1", progress=progress)
    assert raised.value is own
    for server in servers:
        # Nobody was asked what it thinks of it: one status for the roll call.
        assert (len(server.begins), server.calls.count("status")) == (1, 1)
        assert list(server.ended.values()) == ["aborted"]


# closing


@pytest.mark.parametrize("route", ["begin", "stream", "prepare"])
def test_closing_a_pusher_ends_the_push_of_another_thread(make: MakeServer, route: str) -> None:
    servers = make(), make()
    servers[0].hooks[route] = sleeping(60)
    pusher = pusher_for(*servers, on_server_failure="exclude")
    errors: list[BaseException] = []

    def push() -> None:
        try:
            pusher.push(make_weights(), weight_version="v1")
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    while route not in servers[0].calls or servers[1].status().update is None:
        time.sleep(0.01)
    pusher.close()
    # When close returns, the push has ended, and the servers know.
    assert {server.status().update for server in servers} == {None}
    thread.join(10)
    assert our_threads() == []
    (error,) = errors
    assert isinstance(error, PushError)
    assert (error.code, error.message) == (ErrorCode.ABORTED, "the push was ended: its pusher was closed")
    assert list(servers[1].ended.values()) == ["aborted"]


@pytest.mark.parametrize("background", [False, True])
def test_a_callback_may_close_its_pusher(make: MakeServer, background: bool) -> None:
    server = make()
    pusher = pusher_for(server)

    def progress(step: PushProgress) -> None:
        if step.bucket == 1:
            pusher.close()

    if background:
        # It is waited for, and nobody can wait for himself: the pusher is closed when it has ended.
        handle = pusher.push_async(make_weights(), weight_version="v1", progress=progress)
        assert handle.result(60).weight_version == "v1"
        handle.wait()
    else:
        with pytest.raises(PushError, match="its pusher was closed") as ended:
            pusher.push(make_weights(), weight_version="v1", progress=progress)
        assert ended.value.code is ErrorCode.ABORTED
        assert list(server.ended.values()) == ["aborted"]
    assert our_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        pusher.push(make_weights(), weight_version="v2")
    pusher.close()


def test_a_push_that_commits_is_waited_for(make: MakeServer) -> None:
    server = make()
    server.hooks["finish"] = sleeping(0.5)
    pusher = pusher_for(server)
    reports: list[str] = []
    thread = threading.Thread(
        target=lambda: reports.append(pusher.push(make_weights(), weight_version="v1").weight_version)
    )
    thread.start()
    while "finish" not in server.calls:
        time.sleep(0.01)
    pusher.close()
    thread.join(10)
    assert reports == ["v1"]


def test_what_needs_no_weights_takes_its_turn_too(make: MakeServer) -> None:
    server = make()
    slow(server)
    with pusher_for(server) as pusher:
        handle = pusher.push_async(make_weights(), weight_version="v1")
        for other in (pusher.rollback, lambda: pusher.push_from_disk("/x", weight_version="v2")):
            with pytest.raises(PushError, match="in the middle of another push") as refused:
                other()
            assert refused.value.code is ErrorCode.UPDATE_IN_PROGRESS
        handle.result(60)
        # Nothing came of them: what was pushed last is still known.
        assert pusher.catch_up(make_weights()).servers == ()
        with pytest.raises(PushError) as invalid:
            pusher.push_from_disk("", weight_version="v2")
        assert invalid.value.code is ErrorCode.INVALID_REQUEST
        assert pusher.catch_up(make_weights()).servers == ()


# who can take part


@pytest.mark.parametrize("theirs", ["1.0", "2.0"])
def test_a_server_of_another_version_is_found_before_anything_is_sent(make: MakeServer, theirs: str) -> None:
    good, old = make(), make()
    old.protocol = theirs
    with pusher_for(good, old) as pusher:
        with pytest.raises(PushError) as refused:
            pusher.push(make_weights(), weight_version="v1")
        assert (refused.value.code, refused.value.server) == (ErrorCode.PROTOCOL_MISMATCH, old.url)
        assert f"the server speaks protocol {theirs}, the client {PROTOCOL_VERSION}" in refused.value.message
        assert good.begins == old.begins == []
    with pusher_for(good, old, on_server_failure="exclude") as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
        assert [(found.url, found.code) for found in report.excluded] == [(old.url, ErrorCode.PROTOCOL_MISMATCH)]
        assert good.begins[0].protocol == PROTOCOL_VERSION
    if theirs == "1.0":
        with pusher_for(old) as pusher:
            assert pusher.status()[0].protocol == "1.0"  # It can be looked at all the same.


@pytest.mark.parametrize(
    ("client", "server", "older"),
    [
        ("1.1", "1.1", None),
        ("1.1", "1.10", None),
        ("1.10", "1.9", "server"),
        ("1.1", "2.1", "client"),
        ("2.0", "1.9", "server"),
        ("1.1", "", "server"),
        ("1.1", "1.\u0663", "server"),
    ],
)
def test_versions_fit_if_the_server_can_do_all_that_the_client_asks_for(
    client: str, server: str, older: str | None
) -> None:
    why = mismatch(client=client, server=server)
    assert (why is None) == (older is None)
    assert why is None or why.endswith(f"install a matching weightpush on the {older}")


def test_a_server_without_workers_is_left_out_of_a_push_that_needs_them(make: MakeServer) -> None:
    worker = ReceiverProcess()
    good, without = make(workers=[worker]), make()
    with pusher_for(good, without, transport="gloo", on_server_failure="exclude") as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
    assert [(found.url, found.code) for found in report.excluded] == [(without.url, ErrorCode.TRANSPORT_UNAVAILABLE)]
    assert_arrived(good)
    with pusher_for(good, without, transport="gloo") as pusher, pytest.raises(PushError, match="lists no workers"):
        pusher.push(make_weights(), weight_version="v2")
    worker.close()


# for how long


def test_a_server_is_given_what_it_gives_itself(make: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http, delivery):
        monkeypatch.setattr(module, "SLACK_S", 0.2)
    server = make()
    deadlines = Deadlines(bucket_s=0.3, commit_s=1.0)
    # Longer than bucket_s + commit_s: its last step may take a little more.
    server.hooks["finish"] = sleeping(1.8)
    with pusher_for(server, deadlines=deadlines) as pusher:
        assert pusher.push(make_weights(), weight_version="v1").weight_version == "v1"


@pytest.mark.parametrize("given", [Deadlines(), Deadlines(bucket_s=0.1, commit_s=0.1, drain_s=0.1)])
def test_no_call_is_given_less_than_its_steps(given: Deadlines) -> None:
    direct, staged = UpdateMode.DIRECT, UpdateMode.STAGED
    commit = given.commit_s + limits.publish_s(given) + limits.SETTLE_S
    assert limits.begin_s(given) > 2 * given.commit_s + given.rendezvous_s + given.drain_s
    assert limits.finish_s(given, direct) == given.bucket_s + commit
    assert limits.finish_s(given, staged) > limits.prepare_s(given, staged) + given.drain_s + commit
    assert limits.prepare_s(given, direct) < limits.prepare_s(given, staged)
    assert limits.rollback_s(given) > given.drain_s + 2 * given.commit_s + commit
    assert limits.load_s(given) > given.drain_s + 5 * given.commit_s + commit
