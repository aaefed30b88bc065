"""``POST /reload/prepare``: all that may still go wrong, before the new weights serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from integration.conftest import PROMPTS, Checkpoints
from integration.test_faults import closed, repaired
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess


@contextmanager
def streamed(server: ServerProcess, checkpoints: Checkpoints, **options: object) -> Iterator[RawUpdate]:
    """An update to B whose buckets have all been sent."""
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin(**options).raise_for_status()
    update.stream_all()
    yield update


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_prepared_update_commits_with_what_is_left(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], mode: str
) -> None:
    with streamed(server, checkpoints, mode=mode) as update:
        prepared = update.prepare()
        prepared.raise_for_status()
        status = server.status()
        assert status["update"]["phase"] == "prepared"
        assert status["state"] == ("updating" if mode == "direct" else "staging")
        assert status["weight_version"] != "B"
        if mode == "direct":
            assert error_of(server.complete())["code"] == "not_serving"
        else:
            assert server.complete().headers["X-Weight-Version"] == status["weight_version"]
        assert update.prepare().json() == prepared.json()
        finished = update.finish().json()
    if mode == "direct":
        assert finished["fingerprint"] == prepared.json()["fingerprint"]
    else:
        assert prepared.json()["fingerprint"] is None
    assert server.status()["weight_version"] == "B"
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b


def test_a_bucket_that_comes_after_it_fails_the_update(server: ServerProcess, checkpoints: Checkpoints) -> None:
    with streamed(server, checkpoints, mode="staged") as update:
        update.prepare().raise_for_status()
        late = error_of(update.stream(0))
        assert (late["code"], late["state"]) == ("bucket_out_of_order", "serving")
        assert "while the update was prepared" in late["message"]


def test_repeated_and_late_calls_get_the_same_answers(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    server.set_faults(slow_close_ms=500)
    processed = server.log.read_text().count("wp_test_plugin: post-load processing")
    with streamed(server, checkpoints) as update, ThreadPoolExecutor() as pool:
        both = [pool.submit(update.prepare), pool.submit(update.prepare)]
        server.wait_state("updating")
        while server.status()["update"]["phase"] == "receiving":
            time.sleep(0.01)
        # It comes too early, waits for what is being prepared, and does nothing twice.
        finishing = pool.submit(update.finish)
        answers = [call.result().json() for call in both]
        finished = finishing.result().json()
        assert answers[0] == answers[1] == update.prepare().json()
        assert answers[0]["fingerprint"] == finished["fingerprint"] == server.status()["fingerprint"]
        assert update.finish().json() == finished
    phases = server.status()["last_update"]["phase_seconds"]
    assert {"closing", "resetting_caches", "prepared", "publishing"} <= set(phases)
    assert server.log.read_text().count("wp_test_plugin: post-load processing") == processed + 1
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b


def test_before_all_is_there_it_is_refused_and_the_update_goes_on(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    unknown = update.prepare()
    assert (unknown.status_code, error_of(unknown)["code"]) == (409, "stale_update")
    update.begin().raise_for_status()
    update.stream_all([0])
    early = update.prepare()
    assert (early.status_code, error_of(early)["code"]) == (409, "incomplete_update")
    update.stream_all(range(1, len(update.manifest.buckets)))
    wrong = update.client.post("/reload/prepare", json={"update_id": update.update_id, "epoch": 1})
    assert error_of(wrong)["code"] == "stale_update"
    update.prepare().raise_for_status()
    update.finish().raise_for_status()
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b


@pytest.mark.parametrize(("mode", "after"), [("direct", "failed"), ("staged", "serving")])
@pytest.mark.parametrize("how", ["abort", "lease"])
def test_a_prepared_update_that_nobody_finishes(
    server: ServerProcess,
    checkpoints: Checkpoints,
    cold_a: dict[str, str],
    cold_b: dict[str, str],
    mode: str,
    after: str,
    how: str,
) -> None:
    with streamed(server, checkpoints, mode=mode, deadlines={"lease_s": 60 if how == "abort" else 0.5}) as update:
        update.prepare().raise_for_status()
        if how == "abort":
            assert update.abort().json()["state"] == after
        status = server.wait_state(after)
        assert status["last_error"]["code"] == ("aborted" if how == "abort" else "lease_lost")
        assert status["last_error"]["phase"] == "prepared"
        assert error_of(update.finish())["code"] == "update_failed"
        assert error_of(update.prepare())["code"] == "update_failed"
    if mode == "direct":
        closed(server)
        repaired(server, checkpoints, cold_b)
    else:
        assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_a


def test_post_load_processing_that_breaks_is_found_before_the_commit(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    server.set_faults(close="kernel refused the weight")
    with streamed(server, checkpoints) as update:
        broken = update.prepare()
        assert (broken.status_code, error_of(broken)["code"]) == (409, "postload_failed")
        assert "kernel refused the weight" in error_of(broken)["message"]
        assert error_of(broken)["state"] == "failed"
    server.set_faults()
    repaired(server, checkpoints, cold_b)


def test_an_answer_that_comes_meanwhile_is_refused(server: ServerProcess, checkpoints: Checkpoints) -> None:
    """A frozen request goes on after ``finish`` only, and with the new weights."""
    with ThreadPoolExecutor() as pool:
        version = server.status()["weight_version"]
        running = pool.submit(server.complete, "long", max_tokens=200)
        server.wait_running()
        with streamed(server, checkpoints, in_flight="keep") as update:
            update.prepare().raise_for_status()
            refused: httpx.Response = server.complete()
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert not running.done()
            update.finish().raise_for_status()
        assert running.result().headers["X-Weight-Version"] == f"{version}, B"


@pytest.mark.parametrize("prepared", [False, True])
def test_a_trainer_that_keeps_its_update_may_wait_for_others(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], prepared: bool
) -> None:
    with streamed(server, checkpoints, deadlines={"lease_s": 1.5}) as update:
        if prepared:
            update.prepare().raise_for_status()
        epoch = server.status()["update"]["epoch"]
        for _ in range(10):
            kept = update.keep(epoch)
            kept.raise_for_status()
            assert kept.json() == {"update_id": update.update_id, "epoch": epoch, "lease_s": 1.5}
            time.sleep(0.3)
        # Another epoch's call renews nothing, and what it asks for is not said to be.
        assert error_of(update.keep(epoch - 1))["code"] == "stale_update"
        update.finish().raise_for_status()
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b
    # It is over: a late call finds nothing to keep.
    assert error_of(update.keep())["code"] == "stale_update"


def test_who_does_not_keep_it_loses_it_and_cannot_get_it_back(server: ServerProcess, checkpoints: Checkpoints) -> None:
    with streamed(server, checkpoints, mode="staged", deadlines={"lease_s": 0.5}) as update:
        server.wait_state("serving")
        late = error_of(update.keep())
    assert (late["code"], late["details"]["cause"]["code"]) == ("update_failed", "lease_lost")
    assert server.status()["update"] is None


def test_a_begin_of_another_version_is_refused(server: ServerProcess, checkpoints: Checkpoints) -> None:
    before = server.status()
    for protocol in ("1.999", "2.0"):
        refused = RawUpdate(server, read_tensors(checkpoints.b), version="B").begin(protocol=protocol)
        assert (refused.status_code, error_of(refused)["code"]) == (422, "protocol_mismatch")
        assert f"the server speaks protocol {before['protocol']}, the client {protocol}" in error_of(refused)["message"]
    assert server.status() == before
