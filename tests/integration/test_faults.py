"""After the first write: whatever breaks ends in ``failed``, by name, is never served, and the next push repairs it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support import trainer
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess
from weightpush_client import PushError, WeightPusher
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.messages import Deadlines


def closed(server: ServerProcess) -> None:
    """The gate refuses, liveness goes on, readiness does not."""
    refused = server.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "not_serving"
    assert refused.json()["error"]["state"] == "failed"
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/reload/status").status_code == 503
        for path in ("/v1/chat/completions", "/invocations", "/v1/responses", "/v1/embeddings", "/generative_scoring"):
            assert client.post(path, json={"prompt": "x"}).status_code == 503, path
        assert client.get("/v1/models").status_code == 200
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def repaired(server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]) -> None:
    """A complete push works without a restart."""
    with WeightPusher(server.url, token=TOKEN, transport="gloo", bucket_bytes=40_000) as pusher:
        pusher.push(checkpoints.b, weight_version="B")
    status = server.status()
    assert (status["state"], status["weight_version"], status["last_error"]) == ("serving", "B", None)
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


def flip(content: bytes, at: int = -5) -> bytes:
    """Return ``content`` with one bit changed."""
    changed = bytearray(content)
    changed[at] ^= 0x10
    return bytes(changed)


def swapped_rows(update: RawUpdate) -> bytes:
    """Return bucket 1 with two rows of one tensor swapped, and the digests of before."""
    spec = next(spec for spec, _ in update.manifest.bucket_tensors(1) if len(spec.shape) == 2)
    digests = {s.name: tensor_digest(update.tensors[s.name]) for s, _ in update.manifest.bucket_tensors(1)}
    kept = update.tensors[spec.name]
    update.tensors[spec.name] = kept[[1, 0, *range(2, len(kept))]]
    body = update.body(1, digests=digests)
    update.tensors[spec.name] = kept
    return body


#: What happens after bucket 0 -> (what is sent, code, what the message must name)
BAD_BUCKETS: dict[str, tuple[Callable[[RawUpdate], object], str, str]] = {
    "flipped bit": (lambda u: u.stream(1, flip(u.body(1))), "digest_mismatch", "model.layers"),
    "swapped rows": (lambda u: u.stream(1, swapped_rows(u)), "digest_mismatch", "model.layers"),
    "wrong digest": (
        lambda u: u.stream(1, u.body(1, digests=dict.fromkeys(u.tensors, "0" * 16))),
        "digest_mismatch",
        "model.layers",
    ),
    "no digest": (lambda u: u.stream(1, u.body(1, digests={})), "digest_mismatch", "no digest"),
    "out of order": (lambda u: u.stream(2), "bucket_out_of_order", "bucket 1 is next"),
    "twice": (lambda u: u.stream(0), "bucket_out_of_order", "bucket 0 came twice"),
    "beyond the plan": (lambda u: u.stream(99, u.body(1)), "bucket_out_of_order", "beyond the plan"),
    "another bucket's bytes": (lambda u: u.stream(1, u.body(2)), "bucket_out_of_order", "bucket 2 came where bucket 1"),
    "too long": (lambda u: u.stream(1, u.body(1) + b"x"), "bucket_mismatch", "data should end"),
    "too short": (lambda u: u.stream(1, u.body(1)[:-1]), "bucket_mismatch", "data should end"),
    "not a bucket": (lambda u: u.stream(1, b"no safetensors at all"), "bucket_mismatch", "bucket refused"),
    "announced": (
        lambda u: u.client.post("/reload/stream", json={"update_id": u.update_id, "bucket": 1}),
        "bucket_out_of_order",
        "this update goes over http",
    ),
}


@pytest.mark.parametrize("kind", BAD_BUCKETS)
@pytest.mark.case("C4", "C6", "C19", "C20")
def test_a_bad_bucket_fails_the_update(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], kind: str
) -> None:
    send, code, named = BAD_BUCKETS[kind]
    before = server.status()["weight_version"]
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin().raise_for_status()
    update.stream_all([0])
    answer = send(update)
    assert answer.status_code == 409  # type: ignore[attr-defined] # every sender returns a response
    error = error_of(answer)  # type: ignore[arg-type] # as above
    assert error["code"] == code
    assert named in error["message"]
    assert error["state"] == "failed"
    assert error["update_id"] == update.update_id
    status = server.status()
    assert (status["state"], status["weight_version"]) == ("failed", before)
    assert status["last_error"]["code"] == code
    assert status["last_error"]["phase"] == "receiving"
    finish = update.finish()
    assert finish.status_code == 409
    assert error_of(finish)["code"] == "update_failed"
    assert error_of(finish)["details"]["cause"]["code"] == code
    assert error_of(update.stream(1))["code"] == "update_failed"
    closed(server)
    repaired(server, checkpoints, cold_b)


@pytest.mark.case("C3", "C10", "C20")
def test_finish_before_all_buckets_is_refused_and_the_update_goes_on(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin().raise_for_status()
    update.stream_all([0, 1])
    answer = update.finish()
    assert (answer.status_code, error_of(answer)["code"]) == (409, "incomplete_update")
    assert f"2 of {len(update.manifest.buckets)} buckets" in error_of(answer)["message"]
    assert server.status()["state"] == "updating"
    update.stream_all(range(2, len(update.manifest.buckets)))
    update.finish().raise_for_status()
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


@pytest.mark.case("C3", "C46")
def test_abort_after_the_first_write_is_failed_and_may_be_repeated(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin().raise_for_status()
    update.stream_all([0])
    for _ in range(2):
        aborted = update.abort("changed my mind")
        assert aborted.status_code == 200
        assert aborted.json()["state"] == "failed"
        assert aborted.json()["last_error"]["code"] == "aborted"
        assert aborted.json()["last_error"]["message"] == "aborted: changed my mind"
    unknown = RawUpdate(server, {}, version="B").abort()
    assert (unknown.status_code, error_of(unknown)["code"]) == (409, "stale_update")
    closed(server)
    repaired(server, checkpoints, cold_b)


@pytest.mark.parametrize("pause_at", ["stream:0", "stream:2", "finish"])
@pytest.mark.parametrize("transport", ["gloo", "http"])
@pytest.mark.case("C1", "C3", "C5")
def test_a_killed_trainer_loses_its_lease(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], pause_at: str, transport: str
) -> None:
    process = trainer.start(
        server.url, checkpoints.b, "B", transport=transport, pause_at=pause_at, token=TOKEN, lease_s=2.0
    )
    assert server.status()["state"] == "updating"
    refused = server.complete()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = time.monotonic()
    status = server.wait_state("failed", timeout_s=10)
    assert time.monotonic() - killed < 5
    # Gloo's closed connection tells at once, while bytes are missing; else the lease does.
    seen_at_once = transport == "gloo" and pause_at != "finish"
    code, text = ("transport_failed", "trainer closed") if seen_at_once else ("lease_lost", r"silent for \d")
    assert status["last_error"]["code"] == code
    assert re.search(text, status["last_error"]["message"])
    closed(server)
    repaired(server, checkpoints, cold_b)


@pytest.mark.slow
@pytest.mark.case("C5", "C38")
def test_ten_dead_trainers_in_a_row_need_no_restart(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    instance = server.status()["instance_id"]
    for number in range(10):
        pause_at = ("stream:0", "stream:1", "stream:3", "finish")[number % 4]
        process = trainer.start(
            server.url, checkpoints.b, f"B{number}", transport="gloo", pause_at=pause_at, token=TOKEN, lease_s=0.5
        )
        process.kill()
        process.wait()
        server.wait_state("failed", timeout_s=10)
    repaired(server, checkpoints, cold_b)
    assert server.status()["instance_id"] == instance


@pytest.mark.case("C81", "C99")
def test_a_stopped_trainer_is_like_a_dead_one_and_cannot_come_back(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    process = trainer.start(
        server.url, checkpoints.a, "late", transport="http", pause_at="stream:1", token=TOKEN, lease_s=0.5
    )
    late = server.status()["update"]["update_id"]
    process.send_signal(signal.SIGSTOP)
    try:
        server.wait_state("failed", timeout_s=10)
        repaired(server, checkpoints, cold_b)
        with server.client() as client:
            answer = client.post("/reload/finish", json={"update_id": late})
        assert (answer.status_code, error_of(answer)["code"]) == (409, "update_failed")
        assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", ["gloo", "http"])
@pytest.mark.case("C14", "C15", "C42")
def test_a_workers_error_reaches_the_trainer_by_name(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], transport: str
) -> None:
    server.set_faults(land_bucket=3, error="no room for bucket three")
    started = time.monotonic()
    with (
        pytest.raises(PushError) as failed,
        WeightPusher(server.url, token=TOKEN, transport=transport, bucket_bytes=40_000) as pusher,
    ):
        pusher.push(checkpoints.b, weight_version="B")
    assert time.monotonic() - started < 20
    assert "no room for bucket three" in failed.value.message
    assert failed.value.server == server.url
    cause = failed.value.details.get("cause", {}).get("details", failed.value.details)
    assert cause["exception"] == "MemoryError"
    assert (cause["worker_rank"], cause["bucket"]) == (0, 3)
    assert server.status()["last_error"]["code"] == "landing_failed"
    server.set_faults()
    closed(server)
    repaired(server, checkpoints, cold_b)


@pytest.mark.case("C6", "C107")
def test_a_worker_that_committed_too_early_serves_nothing_and_keeps_nothing(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    """What broke between the workers' commit and the server's own leaves weights of no version in memory."""
    before = server.status()["weight_version"]
    server.set_faults(label="no room for a label")
    with (
        pytest.raises(PushError, match="no room for a label"),
        WeightPusher(server.url, token=TOKEN) as pusher,
    ):
        pusher.push(checkpoints.b, weight_version="B")
    server.set_faults()
    status = server.status()
    assert (status["state"], status["weight_version"]) == ("failed", before)
    assert status["last_error"]["phase"] == "publishing"
    assert [(worker["tainted"], worker["weight_version"]) for worker in status["workers"]] == [(True, before)]
    closed(server)
    norm = {name: tensor for name, tensor in read_tensors(checkpoints.a).items() if name == "model.norm.weight"}
    refused = RawUpdate(server, norm, version="A+B").begin(partial=True)
    assert error_of(refused)["code"] == "manifest_rejected"
    repaired(server, checkpoints, cold_b)


@pytest.mark.case("C6", "C107")
def test_a_commit_that_is_slow_in_its_last_step_is_not_given_up_half_done(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    server.set_faults(hold={"publishing": 2500})
    deadlines = Deadlines(commit_s=2)
    with WeightPusher(server.url, token=TOKEN, deadlines=deadlines) as pusher:
        pusher.push(checkpoints.b, weight_version="B")
    server.set_faults()
    status = server.status()
    assert (status["state"], status["weight_version"]) == ("serving", "B")
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


@pytest.mark.case("C6", "C107")
def test_an_error_in_post_load_processing_is_never_published(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    before = server.status()["weight_version"]
    server.set_faults(close="kernel refused the weight")
    with (
        pytest.raises(PushError, match="kernel refused the weight"),
        WeightPusher(server.url, token=TOKEN) as pusher,
    ):
        pusher.push(checkpoints.b, weight_version="B")
    status = server.status()
    assert (status["state"], status["weight_version"]) == ("failed", before)
    assert status["last_error"]["phase"] == "closing"
    assert status["workers"][0]["tainted"]
    server.set_faults()
    closed(server)
    repaired(server, checkpoints, cold_b)


def test_a_commit_that_takes_too_long_is_failed_and_the_next_push_waits_for_it(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    server.set_faults(slow_close_ms=2500)
    with (
        pytest.raises(PushError, match="commit_s") as failed,
        WeightPusher(server.url, token=TOKEN, deadlines=Deadlines(commit_s=0.5)) as pusher,
    ):
        pusher.push(checkpoints.b, weight_version="B")
    assert failed.value.code == "deadline_exceeded"
    assert server.wait_state("failed", timeout_s=10)["last_error"]["code"] == "deadline_exceeded"
    server.set_faults()
    repaired(server, checkpoints, cold_b)


def test_progress_moves_and_the_status_answers_while_a_push_is_slow(
    server: ServerProcess, checkpoints: Checkpoints
) -> None:
    server.set_faults(slow_land_ms=150)
    process = trainer.start(server.url, checkpoints.b, "B", transport="gloo", pause_at="none", token=TOKEN, lease_s=10)
    seen = []
    while process.poll() is None:
        status = server.status()
        if status["update"] is not None and status["update"]["phase"] == "receiving":
            seen.append(status["update"]["bytes_done"])
    assert process.returncode == 0, process.communicate()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 3
    assert server.status()["weight_version"] == "B"


@pytest.mark.parametrize("in_flight", ["wait", "abort", "keep"])
@pytest.mark.case("C47", "C87")
def test_an_abort_while_draining_leaves_a_server_that_answers(
    server: ServerProcess, checkpoints: Checkpoints, in_flight: str
) -> None:
    """The engine is paused in this phase, and must not stay so."""
    before = server.answer("long", max_tokens=200)
    for delay_s in (0.0, 0.02, 0.05, 0.2):
        update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
        with ThreadPoolExecutor() as pool:
            running = pool.submit(server.complete, "long", max_tokens=200)
            time.sleep(0.2)
            begun = pool.submit(update.begin, in_flight=in_flight)
            while server.status()["update"] is None and not begun.done():
                time.sleep(0.002)
            time.sleep(delay_s)
            aborted = update.abort()
            assert running.result().status_code in (200, 503)
            begun.result()
        if aborted.json()["state"] == "failed":  # It was open already.
            repair = RawUpdate(server, read_tensors(checkpoints.a), version="A")
            repair.begin().raise_for_status()
            repair.stream_all()
            repair.finish().raise_for_status()
        assert server.status()["state"] == "serving"
        assert server.answer("long", max_tokens=200) == before


@pytest.mark.case("C38", "C47")
def test_a_bucket_that_is_still_landing_cannot_reach_the_next_update(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    server.set_faults(slow_land_ms=6000)
    late = RawUpdate(server, read_tensors(checkpoints.a), version="late")
    late.begin().raise_for_status()
    with ThreadPoolExecutor() as pool:
        landing = pool.submit(late.stream, 0)
        time.sleep(0.5)
        assert late.abort().json()["state"] == "failed"
        server.set_faults()
        refused = RawUpdate(server, read_tensors(checkpoints.b), version="B").begin()
        assert (refused.status_code, error_of(refused)["code"]) == (409, "update_in_progress")
        assert "still busy" in error_of(refused)["message"]
        assert error_of(landing.result())["code"] == "aborted"
    deadline = time.monotonic() + 20
    while True:
        update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
        if update.begin().status_code == 200:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    update.stream_all()
    update.finish().raise_for_status()
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


def test_bytes_that_arrive_keep_the_lease(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B", bucket_bytes=10**9)
    update.begin(deadlines={"lease_s": 1.0, "bucket_s": 30.0}).raise_for_status()
    body = update.body(0)

    def slowly() -> Iterator[bytes]:
        for start in range(0, len(body), len(body) // 12):
            time.sleep(0.25)
            yield body[start : start + len(body) // 12]

    answer = update.client.post(
        "/reload/stream",
        params={"update_id": update.update_id, "bucket": 0},
        content=slowly(),
        headers={"Content-Type": "application/octet-stream"},
    )
    answer.raise_for_status()
    update.finish().raise_for_status()
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]
