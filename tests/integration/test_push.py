"""The main job on a real server: what is pushed is what is served, under its own label, and never a mixture."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess
from support.traffic import Traffic
from weightpush_client import WeightPusher
from weightpush_protocol.messages import VERSION_HEADER


@pytest.fixture
def push(server: ServerProcess, checkpoints: Checkpoints) -> Callable[..., object]:
    def push_one(label: str, **options: object) -> object:
        directory = {"A": checkpoints.a, "B": checkpoints.b}[label[0]]
        options = {"transport": "gloo", "bucket_bytes": 40_000, **options}
        with WeightPusher(server.url, token=TOKEN, **options) as pusher:  # type: ignore[arg-type] # options vary
            return pusher.push(directory, weight_version=label)

    return push_one


@pytest.mark.parametrize("transport", ["gloo", "http", "shm"])
@pytest.mark.case("C1", "C32", "C83")
def test_a_round_trip_gives_the_cold_answers(
    server: ServerProcess,
    push: Callable[..., object],
    cold_a: dict[str, str],
    cold_b: dict[str, str],
    transport: str,
) -> None:
    fingerprints = {}
    for label, cold in (("B", cold_b), ("A", cold_a), ("A", cold_a), ("B", cold_b)):
        push(label, transport=transport)
        assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold
        status = server.status()
        assert (status["state"], status["weight_version"]) == ("serving", label)
        assert fingerprints.setdefault(label, status["fingerprint"]) == status["fingerprint"]
    assert fingerprints["A"] != fingerprints["B"]


@pytest.mark.parametrize("bucket_bytes", [1, 40_000, 10**9])
@pytest.mark.case("C33", "C63", "C73")
def test_any_cut_gives_the_same_result(
    server: ServerProcess, push: Callable[..., object], cold_b: dict[str, str], bucket_bytes: int
) -> None:
    push("B", bucket_bytes=bucket_bytes)
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]
    assert server.status()["last_update"]["tensors"] == 25


@pytest.mark.case("C7", "C8")
def test_nothing_cached_survives_a_push(
    server: ServerProcess, push: Callable[..., object], cold_a: dict[str, str], cold_b: dict[str, str]
) -> None:
    prompt = PROMPTS[1]
    assert server.answer(prompt) == server.answer(prompt) == cold_a[prompt]
    push("B")
    answer = server.complete(prompt).json()
    assert answer["choices"][0]["text"] == cold_b[prompt]
    assert not (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    push("A")
    assert server.answer(prompt) == cold_a[prompt]


@pytest.mark.slow
@pytest.mark.case("C11", "C37", "C86")
@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_under_traffic_every_answer_is_purely_old_or_new(
    server: ServerProcess,
    push: Callable[..., object],
    cold_a: dict[str, str],
    cold_b: dict[str, str],
    in_flight: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pure = {"A": cold_a, "B": cold_b}
    push("A")
    with Traffic(server, PROMPTS) as traffic:
        for number in range(20):
            push("BA"[number % 2] + f"-{number}", in_flight=in_flight)
            time.sleep(0.15)
    seen: Counter[str] = Counter()
    for (version, prompt, text), count in traffic.answers.items():
        assert text == pure[version[0]][prompt], f"{version} answered {text!r} to {prompt[:20]!r}"
        seen[version[0]] += count
    assert min(seen["A"], seen["B"]) >= 10
    assert set(traffic.refused) <= {503}
    with capsys.disabled():
        print(
            f"\n20 pushes under traffic, in_flight={in_flight}: {seen['A']} answers of A, {seen['B']} of B, "
            f"{traffic.refused[503]} refused with 503, slowest status {traffic.slow_status * 1000:.0f} ms"
        )


@pytest.mark.case("C87")
def test_wait_lets_a_long_answer_end_and_its_deadline_ends_it(
    server: ServerProcess, push: Callable[..., object], checkpoints: Checkpoints
) -> None:
    from weightpush_protocol.messages import Deadlines

    whole = server.answer("long", max_tokens=200)
    for drain_s, finish in ((30.0, "length"), (0.2, "abort")):
        push("A")
        with ThreadPoolExecutor() as pool:
            running = pool.submit(server.complete, "long", max_tokens=200)
            time.sleep(0.3)
            push("B", deadlines=Deadlines(drain_s=drain_s))
            answer = running.result()
        assert answer.headers[VERSION_HEADER] == "A"
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == finish
        assert whole.startswith(choice["text"])
        assert server.status()["weight_version"] == "B"


@pytest.mark.case("C9", "C87")
def test_keep_lets_an_answer_go_on_with_the_new_weights_and_says_so(
    server: ServerProcess, push: Callable[..., object]
) -> None:
    push("A")
    old = server.answer("long", max_tokens=100)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.complete, "long", max_tokens=100)
        time.sleep(0.4)
        push("B", in_flight="keep")
        answer = running.result()
    text = answer.json()["choices"][0]["text"]
    assert answer.headers[VERSION_HEADER] == "A, B"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert text != old
    # What it went on with is what B says after the text so far: its KV was computed anew.
    same = next(i for i, (one, two) in enumerate(zip(text, old, strict=True)) if one != two)
    assert same > 0
    continued = server.answer("long" + text[:same], max_tokens=100 - same)
    assert text[same:] == continued


def test_events_tell_the_whole_story(server: ServerProcess, push: Callable[..., object]) -> None:
    statuses: list[dict[str, Any]] = []
    connected = threading.Event()

    def listen() -> None:
        with server.client() as client, client.stream("GET", "/reload/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    statuses.append(json.loads(line.removeprefix("data: ")))
                    connected.set()
                    if statuses[-1]["weight_version"] == "B" and statuses[-1]["serving"]:
                        return

    server.set_faults(slow_land_ms=150, slow_close_ms=300)
    with ThreadPoolExecutor() as pool:
        listening = pool.submit(listen)
        assert connected.wait(10)
        push("B")
        listening.result(timeout=20)
    assert [status["state"] for status in statuses][:1] == ["serving"]
    updates = [status["update"] for status in statuses if status["state"] == "updating"]
    assert {"receiving", "closing"} <= {update["phase"] for update in updates}
    progress = [update["bytes_done"] for update in updates]
    assert progress == sorted(progress)
    assert len(set(progress)) >= 3


@pytest.mark.case("C48", "C50")
def test_a_push_in_many_buckets_goes_through_its_phases_once_and_says_little(
    server: ServerProcess, push: Callable[..., object]
) -> None:
    before = len(server.log.read_text())
    push("B", bucket_bytes=1)
    phases = list(server.status()["last_update"]["phase_seconds"])
    assert phases == [
        *("checking", "rendezvous", "draining", "opening", "receiving"),
        *("closing", "resetting_caches", "publishing"),
    ]
    lines = server.log.read_text()[before:].splitlines()
    events = [line.partition("event=weightpush.")[2].partition(" ")[0] for line in lines if "weightpush." in line]
    assert events == ["update_began", *["update_phase"] * len(phases), "update_committed"]
    assert sum("wp_test_plugin: post-load processing" in line for line in lines) == 1
    assert not [line for line in lines if "WARNING" in line or "ERROR" in line]


@pytest.mark.case("C44", "C83")
def test_curl_alone_can_push(server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]) -> None:
    """The manifest comes from the server, the one bucket is the checkpoint file itself, without digests."""
    content = (checkpoints.b / "model.safetensors").read_bytes()
    with server.client() as client:
        manifest = client.get("/reload/manifest").json()
        begin = {
            "weight_version": "curl-B",
            "manifest": {"tensors": manifest["tensors"]},
            "transport": {"name": "http"},
            "digest": "none",
        }
        client.post("/reload/begin", json=begin).raise_for_status()
        assert server.status()["update"]["digest"] == "none"
        streamed = client.post(
            "/reload/stream", content=content, headers={"Content-Type": "application/x-www-form-urlencoded"}
        )
        assert streamed.json()["tensors_done"] == len(streamed.json()["landed"]) == 25
        update_id = server.status()["update"]["update_id"]
        finished = client.post("/reload/finish", json={"update_id": update_id}).json()
    assert finished["weight_version"] == "curl-B"
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


def test_the_report_and_the_status_agree(server: ServerProcess, checkpoints: Checkpoints) -> None:
    tensors = read_tensors(checkpoints.b)
    with WeightPusher(server.url, token=TOKEN) as pusher:
        report = pusher.push(tensors, weight_version="B")
    last = server.status()["last_update"]
    assert report.bytes == last["bytes"] == sum(t.nbytes for t in tensors.values())
    assert report.servers[0].fingerprint == server.status()["fingerprint"]
    assert 0 < report.servers[0].pause_seconds <= report.servers[0].seconds <= report.seconds
    assert set(last["phase_seconds"]) >= {"checking", "draining", "opening", "receiving", "closing"}


@pytest.mark.case("C12", "C27")
def test_a_trainer_in_fp32_is_cast_and_a_module_is_a_source(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(checkpoints.b, dtype="float32")
    with WeightPusher(server.url, token=TOKEN) as pusher:
        pusher.push(module, weight_version="B")
        assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


@pytest.mark.case("C46", "C106")
def test_begin_finish_and_abort_may_be_repeated(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    with ThreadPoolExecutor() as pool:
        answers = [job.result() for job in [pool.submit(update.begin) for _ in range(3)]]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert update.begin().text == answers[0].text
    for number in range(len(update.manifest.buckets)):
        first = update.stream(number, call_id=f"call-{number}")
        again = update.stream(number, call_id=f"call-{number}")
        assert first.json() == again.json()
    with ThreadPoolExecutor() as pool:
        finished = [job.result() for job in [pool.submit(update.finish) for _ in range(3)]]
    assert {answer.status_code for answer in finished} == {200}
    assert update.finish().json() == finished[0].json()
    assert update.abort().status_code == 409
    assert update.begin().json()["error"]["code"] == "stale_update"
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]


def test_a_begin_may_name_a_manifest_that_the_server_took_before(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    """Of an unknown one it says so, and nothing has changed; a known one gives the same plan and the same weights."""
    first = RawUpdate(server, read_tensors(checkpoints.b), version="known-1", bucket_bytes=30_001)
    named = {"manifest": None, "manifest_digest": first.manifest.digest()}
    before = server.client().get("/reload/status").json()
    refused = first.begin(**named)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "unknown_manifest")
    assert error_of(refused)["details"] == {"manifest_digest": first.manifest.digest(), "worker_rank": 0}
    after = server.client().get("/reload/status").json()
    assert (after["state"], after["weight_version"], after["last_error"]) == (
        before["state"],
        before["weight_version"],
        before["last_error"],
    )
    whole = first.begin()
    assert whole.status_code == 200
    first.stream_all()
    assert first.finish().status_code == 200
    second = RawUpdate(server, read_tensors(checkpoints.a), version="known-2", bucket_bytes=30_001)
    assert second.manifest.digest() == first.manifest.digest()
    again = second.begin(**named)
    assert again.status_code == 200
    assert again.json()["plan"] == whole.json()["plan"]
    # Repeated, it is the same update.
    assert second.begin(**named).json() == again.json()
    status = server.client().get("/reload/status").json()["update"]
    assert (status["tensors_total"], status["bytes_total"]) == (len(first.tensors), first.manifest.nbytes)
    assert status["buckets_total"] == len(first.manifest.buckets)
    second.stream_all()
    assert second.finish().status_code == 200
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_a
    # Neither, or both, is no begin.
    for change in ({"manifest": None}, {"manifest_digest": named["manifest_digest"]}):
        assert error_of(first.begin(update_id="none", **change))["code"] == "invalid_request"
