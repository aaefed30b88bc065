"""What the benchmark makes of its numbers: turns, medians, ratios, verdicts, text, plots."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import OTHERS, push_parts, ways
from benchmarks.memory import PeakWatch, parse_kib
from benchmarks.models import COUNTS, SIZES
from benchmarks.plots import draw, segments
from benchmarks.profiler import StackSampler, hottest
from benchmarks.report import document
from benchmarks.rounds import Series, deviation_from_line, order, ratio, spread
from benchmarks.run import failed_pushes
from benchmarks.verdicts import growth_verdicts, memory_verdicts, speed_verdicts

REPORT = {
    "seconds": 1.0,
    "phases": dict(check=0.05, begin=0.1, gather=0.2, digest=0.1, send=0.2, wait=0.0, prepare=0.0, finish=0.4),
}
LAST = {
    "worker_seconds": {"receive": 0.1, "digest": 0.1, "land": 0.15, "open": 0.02, "postload": 0.25, "proof": 0.03},
    "phase_seconds": {"receiving": 0.5, "closing": 0.3},
}


# Turns and medians


def test_everybody_runs_once_a_round_and_nobody_always_after_the_same_one() -> None:
    rounds = [order("abcd", number) for number in range(8)]
    assert all(sorted(turn) == list("abcd") for turn in rounds)
    assert {turn[0] for turn in rounds} == set("abcd")
    before = {(first, second) for turn in rounds for first, second in itertools.pairwise(turn)}
    assert len({first for first, second in before if second == "b"}) > 1


def test_nobody_is_in_order() -> None:
    assert order([], 3) == []


def test_a_series_gives_medians_of_what_was_measured() -> None:
    series = Series()
    for number, seconds in enumerate((3.0, 1.0, 2.0)):
        series.add(number, seconds, pause=seconds / 2, parts={"land": seconds / 4})
    found = series.as_dict()
    assert (found["median"], found["pause"], found["parts"]) == (2.0, 1.0, {"land": 0.5})
    assert found["rounds"] == {"0": 3.0, "1": 1.0, "2": 2.0}


def test_a_series_that_only_failed_has_no_median() -> None:
    assert Series(errors=["broken"]).as_dict()["median"] is None


def test_ratios_are_taken_round_by_round_so_that_drift_cancels() -> None:
    # The machine got three times slower on the way; each round says two.
    assert ratio({"0": 2.0, "1": 6.0, "2": 6.0}, {"0": 1.0, "1": 3.0, "2": 3.0}) == 2.0
    assert ratio({"0": 2.0, "1": 5.0}, {"0": 1.0}) == 2.0
    assert ratio({"0": 2.0}, {"1": 1.0}) is None


def test_distance_from_a_line() -> None:
    assert deviation_from_line([(1, 3), (2, 5), (3, 7)]) == pytest.approx(0)
    assert deviation_from_line([(1, 1), (2, 4), (3, 9)]) > 0.2
    with pytest.raises(ValueError, match="2 points"):
        deviation_from_line([(1, 1), (2, 2)])


def test_spread() -> None:
    assert spread([2.0, 1.0, 1.5]) == 2.0


# Parts of a push


def test_the_parts_of_a_direct_push_that_follow_each_other_make_up_the_whole() -> None:
    parts = push_parts(REPORT, LAST, "direct")
    assert sum(parts[name] for name in ("transfer", "open", "PWAL", "proof", "control")) == pytest.approx(1.0)
    assert parts["check"] == 0.1


def test_a_staged_push_lands_after_its_transfer() -> None:
    direct, staged = (push_parts(REPORT, LAST, mode) for mode in ("direct", "staged"))
    assert direct["control"] - staged["control"] == pytest.approx(0.15)
    assert dict(segments("shm staged", {"parts": staged}))["land"] == 0.15
    assert "land" not in dict(segments("shm direct", {"parts": direct}))


def test_every_transport_meets_every_mode_and_the_floor_comes_first() -> None:
    names = [way.name for way in ways(["http", "shm"], ["direct", "staged"], OTHERS)]
    pushes = ["http direct", "http staged", "shm direct", "shm staged"]
    assert names == ["floor", *pushes, "layerwise", "file", "per-tensor"]
    assert [way.name for way in ways(["shm"], ["direct"], ["floor"])] == ["floor", "shm direct"]


def test_models_of_one_series_have_the_same_bytes() -> None:
    weights = [model.config["num_experts"] * model.config["moe_intermediate_size"] for model in COUNTS]
    assert max(weights) < 1.02 * min(weights)
    assert len({model.config["num_hidden_layers"] for model in SIZES}) == 1


# Verdicts and text


def _way(seconds: float, *, pause: float = 0.0, parts: dict[str, float] | None = None) -> dict[str, Any]:
    series = Series()
    for number in range(3):
        series.add(number, seconds, pause=pause, parts=parts or {})
    return series.as_dict()


def _peak(trainer: int, server: int, bucket: int | None) -> dict[str, int | None]:
    return {
        "trainer_before": 1,
        "server_before": 1,
        "trainer_extra": trainer,
        "server_extra": server,
        "bucket_bytes": bucket,
    }


def _found(*, land: float = 0.11, push: float = 0.4) -> dict[str, Any]:
    parts = {**push_parts(REPORT, LAST, "direct"), "land": land, "PWAL": 0.2}
    model = {
        "what": "a mixture",
        "rounds": 3,
        "tensors": 3000,
        "bytes": 4_000,
        "largest_module_bytes": 100,
        "start_seconds": 1.0,
        "first_push": {"seconds": 0.9, "begin": 0.3},
        "fingerprints_equal": True,
        "ways": {
            "floor": _way(0.1),
            "shm direct": _way(push, pause=0.35, parts=parts),
            "shm staged": _way(0.5, pause=land + 0.2 + 0.05, parts=parts),
            "layerwise": _way(1.3, pause=1.3),
            "file": _way(2.0, pause=1.5),
            "per-tensor": Series(errors=["per-tensor: HTTP 500\nand more"]).as_dict(),
        },
        "memory": {
            "shm direct": _peak(2_000, 2_200, 1_000),
            "shm staged": _peak(2_000, 4_000, 1_000),
            "layerwise": _peak(0, 10, None),
        },
    }

    def point(tensors: int, nbytes: int, seconds: float) -> dict[str, Any]:
        known = _way(seconds, parts=parts)
        return {"what": "one", "tensors": tensors, "bytes": nbytes, "seconds": seconds, **known}

    growth = {
        "bytes": [point(10, size, size / 1000) for size in (1000, 2000, 3000)],
        "tensors": [point(count, 1000, 0.5) for count in (100, 20_000)],
        "servers": [{"servers": 1, **point(10, 1000, 0.4)}],
        "parts": [point(1, 10, 0.1)],
    }
    growth["servers"][0].pop("what")
    machine = {
        "at": "today",
        "command": "make bench",
        "cpu": "a CPU",
        "cores": 2,
        "trainer_core": 0,
        "server_core": 1,
        "memory_gib": 23,
        "load_at_start": 0.1,
        "system": "Linux",
        "versions": {"torch": "2"},
    }
    return {
        "machine": machine,
        "quick": False,
        "rounds": 3,
        "minutes": 9.0,
        "models": {"moe": model},
        "growth": growth,
    }


def test_what_is_reached_and_what_is_missed() -> None:
    verdicts = {verdict.claim: verdict for verdict in speed_verdicts(_found()["models"])}
    landing = verdicts["moe: landing by plan, against the memcpy floor"]
    assert landing.value == pytest.approx(1.1)
    assert landing.reached is True
    assert verdicts["moe: push over shm without PWAL, against the floor"].value == pytest.approx(2.0)
    layerwise = verdicts["moe: push over shm, faster than vLLM's layerwise reload from memory"]
    assert layerwise.value == pytest.approx(3.25)
    assert layerwise.reached is True
    assert verdicts["moe: push over shm, faster than the per-tensor way"].reached is None
    assert verdicts["moe: staged pause beyond landing and PWAL"].value == pytest.approx(50)
    slower = {verdict.claim: verdict for verdict in speed_verdicts(_found(land=0.2, push=0.6)["models"])}
    assert slower[landing.claim].reached is False
    assert slower[layerwise.claim].reached is False


def test_memory_is_judged_in_buckets_modules_and_copies() -> None:
    verdicts = {verdict.claim: verdict.value for verdict in memory_verdicts(_found()["models"])}
    assert verdicts == {
        "moe, shm direct: trainer": 2.0,
        "moe, shm direct: server, in two buckets and the largest module": pytest.approx(2200 / 2100),
        "moe, shm staged: trainer": 2.0,
        "moe, shm staged: server, in copies of the weights": 1.0,
    }


def test_growth_is_judged_where_it_was_measured() -> None:
    line, whole, without = growth_verdicts(_found()["growth"])
    assert line.value == pytest.approx(0)
    assert whole.value == 1.0
    assert without.reached is True
    assert {verdict.reached for verdict in growth_verdicts({})} == {None}


def test_the_document_says_what_was_missed_and_what_failed() -> None:
    found = _found(land=0.2)
    text = document(found)
    assert "| moe: landing by plan, against the memcpy floor | ≤ 1.15 x | 2.00 x | **missed** |" in text
    assert "| one call and broadcast a tensor | failed: per-tensor: HTTP 500 |" in text
    assert "| push over shm, direct | 0.400 | 0.350 | 4.00 | 3.25 | 5.00 | - |" in text
    assert "All pushes ended with the same fingerprint" in text
    assert all(len(line) <= 120 or line.startswith("|") for line in text.splitlines())
    assert "time was up" not in text
    found["models"]["moe"]["rounds"] = 2
    found["models"]["moe"]["fingerprints_equal"] = False
    found["models"]["dense"] = {"what": "dense", "error": "the server did not start"}
    text = document(found)
    assert "**FINGERPRINTS DIFFER**" in text
    assert "(time was up earlier: moe 2 rounds)" in " ".join(text.split())
    assert "Not measured: the server did not start" in text


def test_only_pushes_that_fail_fail_the_command() -> None:
    found = _found()
    assert failed_pushes(found) == []
    found["models"]["moe"]["ways"]["shm direct"]["errors"] = ["lost"]
    found["growth"]["servers"][0]["errors"] = ["lost"]
    assert failed_pushes(found) == ["moe: shm direct", "growth with servers"]
    found["models"] = {"dense": {"what": "dense", "error": "no server"}}
    assert failed_pushes(found)[0] == "dense"


def test_plots_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    found = _found()
    found["models"]["dense"] = {"what": "dense", "error": "no server"}
    files = draw(found, tmp_path)
    assert [file.name for file in files] == ["moe.png", "growth.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


# Looking at processes


def test_lines_of_proc_are_read_as_bytes() -> None:
    text = "VmRSS:\t  100 kB\nRssAnon:\t   12 kB\n"
    assert parse_kib(text, "RssAnon") == 12 * 1024
    assert parse_kib(text, "RssShmem") == 0


def test_memory_that_is_taken_and_given_back_is_seen() -> None:
    with PeakWatch(os.getpid(), []) as watch:
        taken = bytearray(os.urandom(64 * 2**20))
        time.sleep(0.1)
        del taken
    assert watch.peak.trainer_extra > 60 * 2**20
    assert watch.peak.trainer_before > 0


def _busy(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def test_the_profiler_finds_what_a_thread_is_busy_with() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=_busy, args=(stop,), name="worker-7")
    sampler = StackSampler()
    sampler.start()
    thread.start()
    time.sleep(0.5)
    stop.set()
    thread.join()
    sampler.stop()
    # What it calls now and then to see whether it shall end is not what is asked for.
    stacks = [line for line in sampler.folded().splitlines() if "Event.is_set" not in line]
    assert any(line.startswith("worker-7;") and ":_busy" in line for line in stacks)
    folded = "\n".join(stacks)
    table = hottest(folded, idle=(":no_such",))
    assert "test_bench_numbers.py:_busy" in table
    assert "test_bench_numbers.py:_busy" not in hottest(folded, idle=(":_busy",))
