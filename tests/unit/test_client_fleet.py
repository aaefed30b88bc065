"""Several servers, one of which fails or comes late: real HTTP servers and real Gloo receivers."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from support.contract_server import TOKEN, ContractServer, DroppingProxy, ReceiverProcess
from unit.test_client_push import BUCKET_BYTES, assert_arrived, expected_specs, make_weights, our_threads
from weightpush_client import Deadlines, ErrorCode, PushError, PushProgress, WeightPusher, http
from weightpush_client.access import ControlToken, Tls
from weightpush_client.background import Stop, copied
from weightpush_client.membership import Membership
from weightpush_client.sources import open_source
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.state import ServerState

MakeServer = Callable[..., ContractServer]


@pytest.fixture
def make() -> Iterator[MakeServer]:
    with ExitStack() as stack:

        def make(**options: Any) -> ContractServer:
            server = ContractServer(options.pop("specs", None) or expected_specs(), **options)
            stack.callback(server.close)
            return server

        yield make
        assert our_threads() == []


def pusher_for(*servers: ContractServer, **options: Any) -> WeightPusher:
    options = {"token": TOKEN, "bucket_bytes": BUCKET_BYTES, "transport": "http", **options}
    return WeightPusher([server.url for server in servers], **options)


def fail_at(server: ContractServer, route: str, code: ErrorCode = ErrorCode.LANDING_FAILED, call: int = 1) -> None:
    """Have ``server`` fail its update at the given call of ``route``."""

    async def fail() -> None:
        if server.calls.count(route) >= call:
            error = WeightPushError(code, f"broken at {route}")
            server.fail(error)
            raise error

    server.hooks[route] = fail


# exclude


@pytest.mark.parametrize(
    ("route", "begins"), [("status", 1), ("manifest", 1), ("begin", 2), ("stream", 2), ("prepare", 1), ("finish", 1)]
)
def test_the_others_commit_and_the_one_that_failed_is_named(
    make: MakeServer, route: str, begins: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, bad, last = make(), make(), make()
    fail_at(bad, route, call=3 if route == "stream" else 1)
    with pusher_for(first, bad, last, on_server_failure="exclude") as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
        assert [part.url for part in report.servers] == [first.url, last.url]
        assert [(part.weight_version, part.instance_id) for part in report.servers] == [
            ("v1", server.status().instance_id) for server in (first, last)
        ]
        (excluded,) = report.excluded
        assert (excluded.url, excluded.code, excluded.message) == (
            bad.url,
            ErrorCode.LANDING_FAILED,
            f"broken at {route}",
        )
        # A fourth status tells how it is now, unless that is what it cannot say.
        if route == "status":
            assert (excluded.state, excluded.instance_id) == (None, None)
        else:
            written = route in ("stream", "prepare", "finish")
            assert excluded.state is (ServerState.FAILED if written else ServerState.SERVING)
            assert excluded.weight_version == "default"
        for server in (first, last):
            assert_arrived(server)
            assert len(server.begins) == begins
        assert len({begin.update_id for begin in first.begins}) == begins
        assert f"{bad.url}: EXCLUDED" in str(report)
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert [bad.url in record.getMessage() for record in warnings] == [True]
        bad.hooks.clear()
        assert pusher.push(make_weights(), weight_version="v2").excluded == ()
    assert_arrived(bad)


def test_a_server_that_is_not_there_does_not_block(make: MakeServer) -> None:
    here = make()
    gone = make()
    gone.close()
    with pusher_for(here, gone, on_server_failure="exclude") as pusher:
        (excluded,) = pusher.push(make_weights(), weight_version="v1").excluded
    assert (excluded.url, excluded.code, excluded.state) == (gone.url, ErrorCode.UNREACHABLE, None)
    with pusher_for(here, gone) as pusher, pytest.raises(PushError) as refused:
        pusher.push(make_weights(), weight_version="v2")
    assert (refused.value.code, refused.value.server) == (ErrorCode.UNREACHABLE, gone.url)
    assert len(here.begins) == 1


def test_a_server_that_hangs_is_given_up(make: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightpush_client import delivery, pushing

    for module in (http, delivery):
        monkeypatch.setattr(module, "SLACK_S", 0.2)
    monkeypatch.setattr(http, "STATUS_S", 1.0)
    monkeypatch.setattr(pushing, "_SETTLE_S", 1.0)
    good, stuck = make(), make()

    async def hang() -> None:
        await asyncio.sleep(60)

    for route in ("stream", "abort"):
        stuck.hooks[route] = hang
    deadlines = Deadlines(bucket_s=1.5)
    with pusher_for(good, stuck, on_server_failure="exclude", deadlines=deadlines) as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
    assert [part.url for part in report.servers] == [good.url]
    (excluded,) = report.excluded
    assert (excluded.url, excluded.code, excluded.state) == (stuck.url, ErrorCode.UNREACHABLE, ServerState.UPDATING)


def test_when_every_server_fails_the_first_reason_is_raised(make: MakeServer) -> None:
    servers = [make() for _ in range(3)]
    fail_at(servers[1], "begin", ErrorCode.RELOAD_REFUSED)
    fail_at(servers[0], "prepare", ErrorCode.POSTLOAD_FAILED)
    fail_at(servers[2], "prepare", ErrorCode.POSTLOAD_FAILED)
    with pusher_for(*servers, on_server_failure="exclude") as pusher, pytest.raises(PushError) as failed:
        pusher.push(make_weights(), weight_version="v1")
    assert (failed.value.code, failed.value.server) == (ErrorCode.RELOAD_REFUSED, servers[1].url)
    assert [len(server.begins) for server in servers] == [2, 0, 2]
    assert {version for server in servers for version in [server.status().weight_version]} == {"default"}


def test_a_dead_worker_is_told_from_those_that_lost_their_connections_by_it(make: MakeServer) -> None:
    """One group over all workers: everybody reports a failure, and one is to blame."""
    workers = [ReceiverProcess() for _ in range(3)]
    servers = [make(workers=[worker]) for worker in workers]

    killed: list[None] = []

    def kill(progress: PushProgress) -> None:
        if progress.bucket == 2 and not killed:
            killed.append(workers[1].kill())

    with pusher_for(*servers, transport="gloo", on_server_failure="exclude") as pusher:
        report = pusher.push(make_weights(), weight_version="v1", progress=kill)
    assert [part.url for part in report.servers] == [servers[0].url, servers[2].url]
    assert [excluded.url for excluded in report.excluded] == [servers[1].url]
    assert [server.begins[-1].transport.world_size for server in (servers[0], servers[2])] == [3, 3]
    for server in (servers[0], servers[2]):
        assert_arrived(server)
        assert len(server.begins) == 2
    for worker in workers:
        worker.close()


def test_what_the_trainer_breaks_is_blamed_on_nobody(make: MakeServer) -> None:
    servers = make(), make()

    def broken(progress: PushProgress) -> None:
        if progress.bucket == 2:
            raise ZeroDivisionError("the trainer's own")

    with pusher_for(*servers, on_server_failure="exclude") as pusher:
        with pytest.raises(ZeroDivisionError):
            pusher.push(make_weights(), weight_version="v1", progress=broken)
        with pytest.raises(PushError, match="source is empty"):
            pusher.push({}, weight_version="v1")
    for server in servers:
        assert list(server.ended.values()) == ["aborted"]


def test_the_server_with_another_checkpoint_is_left_out_if_it_is_the_odd_one(make: MakeServer) -> None:
    one, odd, other = make(), make(specs=expected_specs()[1:]), make()
    with pusher_for(one, odd, other, on_server_failure="exclude") as pusher:
        (excluded,) = pusher.push(make_weights(), weight_version="v1").excluded
    assert (excluded.url, excluded.code) == (odd.url, ErrorCode.MANIFEST_REJECTED)
    assert "first at 'plain'" in excluded.message
    assert odd.begins == []
    with pusher_for(one, odd, on_server_failure="exclude") as pusher, pytest.raises(PushError, match="'plain'"):
        pusher.push(make_weights(), weight_version="v2")


def test_a_partial_push_leaves_out_who_is_behind(make: MakeServer) -> None:
    good, behind = make(), make()
    part = {"int": torch.arange(700) + 1}
    with pusher_for(good, behind, on_server_failure="exclude") as pusher:
        fail_at(behind, "begin")
        pusher.push(make_weights(), weight_version="v1")
        behind.hooks.clear()
        (excluded,) = pusher.push(part, weight_version="v2", partial=True).excluded
        assert (excluded.url, excluded.code) == (behind.url, ErrorCode.PARTIAL_REFUSED)
        assert "builds on 'v1'" in excluded.message
        # What both have in the end is what the pusher pushed in all.
        report = pusher.catch_up({**make_weights(), **part})
        assert [found.url for found in report.servers] == [behind.url]
        assert report.weight_version == "v2"
    assert torch.equal(behind.weights["int"], part["int"])


@pytest.mark.parametrize("policy", ["abort", "exclude"])
def test_a_partial_push_notices_that_its_base_changes_under_it(make: MakeServer, policy: str) -> None:
    good, changing = make(), make()
    with pusher_for(good, changing, on_server_failure=policy) as pusher:
        pusher.push(make_weights(), weight_version="v1")

        async def roll_back() -> None:
            changing._version = "v0"

        changing.hooks["begin"] = roll_back
        part = {"int": torch.arange(700) + 1}
        if policy == "abort":
            with pytest.raises(PushError) as refused:
                pusher.push(part, weight_version="v2", partial=True)
            assert (refused.value.code, refused.value.server) == (ErrorCode.PARTIAL_REFUSED, changing.url)
            assert good.status().weight_version == "v1"
            # It is seen at once from now on.
            with pytest.raises(PushError, match="builds on 'v1'"):
                pusher.push(part, weight_version="v2", partial=True)
        else:
            (excluded,) = pusher.push(part, weight_version="v2", partial=True).excluded
            assert (excluded.url, excluded.code) == (changing.url, ErrorCode.PARTIAL_REFUSED)
            assert good.status().weight_version == "v2"
    assert changing.status().weight_version == "v0"


def test_who_was_left_out_is_told_when_the_others_have_committed(make: MakeServer) -> None:
    good, last, bad = make(), make(), make()
    fail_at(bad, "prepare", ErrorCode.POSTLOAD_FAILED)
    order: list[str] = []

    async def note(what: str) -> None:
        order.append(what)

    good.hooks["finish"] = last.hooks["finish"] = lambda: note("finish")
    bad.hooks["abort"] = lambda: note("abort")
    with pusher_for(good, last, bad, on_server_failure="exclude") as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
    assert [found.url for found in report.excluded] == [bad.url]
    assert order == ["finish", "finish", "abort"]


def test_an_error_that_names_a_stranger_is_raised(make: MakeServer) -> None:
    stranger = PushError(ErrorCode.LANDING_FAILED, "elsewhere", server="http://stranger:1")

    def progress(step: PushProgress) -> None:
        if step.bucket:
            raise stranger

    with pusher_for(make(), make(), on_server_failure="exclude") as pusher, pytest.raises(PushError) as raised:
        pusher.push(make_weights(), weight_version="v1", progress=progress)
    assert raised.value is stranger


# abort


@pytest.mark.parametrize("route", ["begin", "stream", "prepare"])
def test_under_abort_nobody_commits(make: MakeServer, route: str) -> None:
    first, bad, last = make(), make(), make()
    fail_at(bad, route)
    with pusher_for(first, bad, last) as pusher, pytest.raises(PushError) as failed:
        pusher.push(make_weights(), weight_version="v1")
    assert (failed.value.code, failed.value.server) == (ErrorCode.LANDING_FAILED, bad.url)
    for server in (first, last):
        assert list(server.ended.values()) == ["aborted"]
        assert "finish" not in server.calls
        assert server.status().weight_version == "default"


def test_no_server_is_asked_to_commit_before_all_are_ready(make: MakeServer) -> None:
    servers = [make() for _ in range(3)]
    order: list[str] = []
    for number, server in enumerate(servers):

        async def note(number: int = number) -> None:
            await asyncio.sleep(0.1 * number)
            order.append(f"ready {number}")

        async def commit(number: int = number) -> None:
            order.append(f"commit {number}")

        server.hooks |= {"prepare": note, "finish": commit}
    with pusher_for(*servers) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    assert order[:3] == ["ready 0", "ready 1", "ready 2"]
    assert sorted(order[3:]) == ["commit 0", "commit 1", "commit 2"]


def test_a_lost_answer_to_prepare_is_asked_for_again(make: MakeServer) -> None:
    first, second = make(), make()
    proxy = DroppingProxy(second.port, {"POST /reload/prepare": 1}, "half")
    with WeightPusher([first.url, proxy.url], token=TOKEN, transport="http", bucket_bytes=BUCKET_BYTES) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    proxy.close()
    assert (first.calls.count("prepare"), second.calls.count("prepare")) == (1, 2)
    assert_arrived(second)


def test_one_server_alone_needs_no_preparation(make: MakeServer) -> None:
    server = make()
    with pusher_for(server) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    assert "prepare" not in server.calls


# catching up


def test_only_those_behind_are_brought_to_what_was_pushed_last(make: MakeServer) -> None:
    first, second, late = make(), make(), make()
    members = [first.url, second.url]
    with WeightPusher(lambda: members, token=TOKEN, transport="http", bucket_bytes=BUCKET_BYTES) as pusher:
        with pytest.raises(PushError, match="pushed nothing yet"):
            pusher.catch_up(make_weights())
        pusher.push(make_weights(), weight_version="v1")
        nothing = pusher.catch_up(make_weights())
        assert (nothing.servers, nothing.bytes, str(nothing).splitlines()[0]) == (
            (),
            0,
            "nothing to push: every server that answered serves v1",
        )
        members.append(late.url)
        changed = {**make_weights(), "int": torch.arange(700) + 1}
        with pytest.raises(PushError, match="'int' differs") as refused:
            pusher.catch_up(changed)
        assert refused.value.code is ErrorCode.WEIGHTS_REJECTED
        assert late.begins == []
        report = pusher.catch_up(make_weights())
        assert ([part.url for part in report.servers], report.weight_version) == ([late.url], "v1")
        assert [len(server.begins) for server in (first, second, late)] == [1, 1, 1]
        assert_arrived(late)
        # Going back by another way makes what was pushed last unknown.
        second.hooks["rollback"] = late.hooks["rollback"] = first.hooks["rollback"] = _refuse
        with pytest.raises(PushError):
            pusher.rollback()
        # All of them refused, so nothing has changed.
        assert pusher.catch_up(make_weights()).servers == ()
        first.hooks.clear()
        with pytest.raises(PushError):
            pusher.rollback()
        with pytest.raises(PushError, match="pushed nothing yet"):
            pusher.catch_up(make_weights())


def test_weights_that_change_after_they_were_looked_at_catch_nobody_up(
    make: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, late = make(), make()
    weights = make_weights()
    with pusher_for(good) as pusher:
        pusher.push(weights, weight_version="v1")
        pusher._membership._urls = (good.url, late.url)

        async def change() -> None:
            weights["int"] += 1

        late.hooks["begin"] = change
        with pytest.raises(PushError, match="'int' differs") as refused:
            pusher.catch_up(weights)
    assert refused.value.code is ErrorCode.WEIGHTS_REJECTED
    assert late.status().weight_version == "default"


async def _refuse() -> None:
    raise WeightPushError(ErrorCode.NO_COPY, "no copy")


def test_without_digests_nobody_can_catch_up(make: MakeServer) -> None:
    with pusher_for(make(), digest="none") as pusher:
        pusher.push(make_weights(), weight_version="v1")
        with pytest.raises(PushError, match="without digests"):
            pusher.catch_up(make_weights())


# membership


def test_connections_are_kept_for_those_that_stay_and_closed_for_those_that_go(make: MakeServer) -> None:
    first, second, third = make(), make(), make()
    present = [first.url, second.url]
    membership = Membership(lambda: present, token=ControlToken(TOKEN), verify=Tls())
    try:
        with membership.present() as fleet:
            before = fleet.servers
            assert len(fleet.call(lambda _, server: server.status())) == 2
            # Who leaves in the middle of a call is not cut off.
            present[:] = [second.url, third.url]
            with membership.present() as others:
                assert others.servers[0] is before[1]
            assert fleet.call(lambda _, server: server.status())[0].serving
        assert [server._client.is_closed for server in before] == [True, False]
        present.clear()
        assert membership.urls == ()
        with pytest.raises(PushError, match="no servers at the moment"), membership.present():
            pass
    finally:
        membership.stop()
    assert before[1]._client.is_closed


def test_what_the_function_raises_comes_through(make: MakeServer) -> None:
    def lost() -> list[str]:
        raise LookupError("the registry is away")

    with WeightPusher(lost, token=TOKEN) as pusher, pytest.raises(LookupError, match="registry"):
        pusher.push(make_weights(), weight_version="v1")


# in the background


def slow(server: ContractServer, seconds: float = 0.1) -> None:
    async def wait() -> None:
        await asyncio.sleep(seconds)

    server.hooks["stream"] = wait


def test_a_push_in_the_background_may_be_waited_for(make: MakeServer) -> None:
    server = make()
    slow(server)
    with pusher_for(server) as pusher:
        handle = pusher.push_async(make_weights(), weight_version="v1")
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.05)
        for again in (pusher.push, pusher.push_async, lambda weights, **_: pusher.catch_up(weights)):
            with pytest.raises(PushError, match="in the middle of another push"):
                again(make_weights(), weight_version="v2")
        assert handle.result(timeout=60).weight_version == "v1"
        assert (handle.done(), handle.cancel()) == (True, False)
        assert pusher.push(make_weights(), weight_version="v2").weight_version == "v2"
        # Leaving the block waits for the last one.
        pusher.push_async(make_weights(), weight_version="v3")
    assert server.status().weight_version == "v3"
    assert_arrived(server)


def test_a_cancelled_push_is_aborted_on_the_servers(make: MakeServer) -> None:
    server = make()
    slow(server, 30.0)
    with pusher_for(server, on_server_failure="exclude") as pusher:
        handle = pusher.push_async(make_weights(), weight_version="v1")
        while "stream" not in server.calls:
            time.sleep(0.01)
        assert handle.cancel()
        with pytest.raises(PushError, match="cancelled") as cancelled:
            handle.result(timeout=20)
        assert cancelled.value.code is ErrorCode.ABORTED
        assert list(server.ended.values()) == ["aborted"]
        server.hooks.clear()
        pusher.push(make_weights(), weight_version="v2")
    slow(server, 30.0)
    pusher = pusher_for(server)
    handle = pusher.push_async(make_weights(), weight_version="v3")
    # As a block that ends with an exception does.
    pusher.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert server.status().weight_version == "v2"
    with pytest.raises(PushError, match="cancelled"):
        handle.result(timeout=0)


def test_a_push_that_commits_cannot_be_cancelled(make: MakeServer) -> None:
    server = make()
    reached = threading.Event()

    async def commit() -> None:
        reached.set()
        await asyncio.sleep(0.3)

    server.hooks["finish"] = commit
    with pusher_for(server) as pusher:
        handle = pusher.push_async(make_weights(), weight_version="v1")
        assert reached.wait(60)
        assert not handle.cancel()
        assert handle.result(timeout=60).weight_version == "v1"


def test_a_wish_to_stop_is_heard_whenever_it_comes() -> None:
    stop, heard = Stop(), []
    assert stop.ask()
    with stop.interrupting(lambda: heard.append("at once")):
        assert stop.ask()
    assert heard == ["at once", "at once"]
    for late in (stop.check, stop.pass_by):
        with pytest.raises(PushError, match="cancelled"):
            late()
    other = Stop()
    other.pass_by()
    assert not other.ask()
    other.check()


def test_a_failure_in_the_background_is_logged_even_if_nobody_asks(
    make: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make()
    fail_at(server, "stream")
    with pusher_for(server) as pusher:
        handle = pusher.push_async(make_weights(), weight_version="v1")
    assert "the push of v1 in the background failed" in caplog.text
    with pytest.raises(PushError, match="broken at stream"):
        handle.result()


def test_a_copy_may_change_meanwhile_and_tied_weights_stay_tied(make: MakeServer) -> None:
    server = make()
    slow(server)
    weights = {name: tensor.detach().clone() for name, tensor in make_weights().items()}
    with pusher_for(server) as pusher:
        handle = pusher.push_async(weights, weight_version="v1", copy=True)
        for tensor in weights.values():
            tensor.zero_()
        handle.result(timeout=60)
    assert_arrived(server)

    tied = torch.ones(2, 2)
    copies = copied(open_source({"embed": tied, "head": tied, "other": torch.ones(2, 2)}))
    assert list(copies) == ["embed", "head", "other"]
    assert copies["embed"] is copies["head"]
    assert copies["embed"] is not tied
    assert copies["other"] is not copies["embed"]
    with pusher_for(server) as pusher, pytest.raises(TypeError, match="cannot push a int"):
        pusher.push_async(3, weight_version="v1", copy=True)  # type: ignore[arg-type]  # that is the point
    assert our_threads() == []


def test_a_trainer_that_ends_has_its_last_push_committed(make: MakeServer) -> None:
    server = make()
    slow(server)
    script = (
        "import sys; from unit.test_client_push import BUCKET_BYTES, make_weights; "
        "from weightpush_client import WeightPusher; "
        "pusher = WeightPusher(sys.argv[1], token=sys.argv[2], transport='http', bucket_bytes=BUCKET_BYTES); "
        "pusher.push_async(make_weights(), weight_version='last')"
    )
    command = [sys.executable, "-c", script, server.url, TOKEN]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert server.status().weight_version == "last"
