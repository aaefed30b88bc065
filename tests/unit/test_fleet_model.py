"""The model of fleets: nothing is faster than its links, more never takes less, and it says what docs/scale.md says."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import simulate_fleet
from benchmarks.scale import constants as data
from benchmarks.scale.limits import limits
from benchmarks.scale.model import (
    NEEDED,
    TODAY,
    Job,
    Transport,
    floor_s,
    job_for,
    predict,
    rendezvous_s,
    trainer_ranks_for,
    workers_for,
)
from benchmarks.scale.plot import plot
from benchmarks.scale.published import CASES, Published, predicted_s
from benchmarks.scale.report import fill, seconds_text, table, tables, try_predict
from benchmarks.scale.sites import MODELS, SERVERS, SITES, Model, Site

ROOT = Path(__file__).resolve().parents[2]
CONSTANTS = data.load()
IB = SITES["ib-400"]


def all_jobs() -> list[Job]:
    choices = itertools.product(MODELS.values(), SERVERS, SITES.values(), Transport, (TODAY, NEEDED))
    jobs = [
        job_for(model, servers, site, transport, protocol=protocol)
        for model, servers, site, transport, protocol in choices
    ]
    return [job for job in jobs if try_predict(job, CONSTANTS)]


def slowest_link_s(job: Job) -> float:
    """The least that bytes alone allow, told by where they must pass; line rates, and nothing from the model."""
    site = job.site
    if job.all_workers + job.trainer_ranks <= site.gpus or job.transport is Transport.SHM:
        return job.model.nbytes / job.workers / site.nvlink_bps
    workers_of_a_machine = min(site.gpus, job.all_workers)
    servers_of_a_machine = max(1, workers_of_a_machine // job.workers)
    shared = workers_of_a_machine / job.workers / servers_of_a_machine
    into_a_machine = job.model.nbytes * shared / (site.nic_bps * site.nics)
    if job.transport in {Transport.NCCL, Transport.GLOO}:
        return max(into_a_machine, job.model.nbytes / site.nic_bps)
    if job.transport is Transport.HTTP:
        return max(into_a_machine, job.servers * job.model.nbytes / site.nic_bps)
    if job.transport is Transport.SLICES:
        machines = -(-job.trainer_ranks // site.gpus)
        return max(into_a_machine, job.servers * job.model.nbytes / (machines * site.nics * site.nic_bps))
    return into_a_machine


def test_no_push_is_faster_than_the_slowest_link() -> None:
    jobs = all_jobs()
    assert len(jobs) > 800
    for job in jobs:
        prediction = predict(job, CONSTANTS)
        assert prediction.stream >= floor_s(job, CONSTANTS) >= slowest_link_s(job), job
        assert prediction.push > prediction.pause > prediction.stream, job


def test_more_bytes_and_more_servers_never_take_less() -> None:
    for job in all_jobs():
        before = predict(job, CONSTANTS)
        larger = replace(job, model=replace(job.model, parameters=1.7 * job.model.parameters))
        after = predict(larger, CONSTANTS)
        assert after.push > before.push, job
        assert after.staged_pause >= before.staged_pause, job
        more = try_predict(replace(job, servers=job.servers + 3), CONSTANTS)
        if more is not None:
            assert more.push >= before.push, job
            assert more.failure >= before.failure, job


def test_slower_cards_never_make_a_push_faster() -> None:
    for job in all_jobs():
        slower = replace(job, site=replace(job.site, nic_bps=job.site.nic_bps / 3))
        assert predict(slower, CONSTANTS).push >= predict(job, CONSTANTS).push, job


def test_what_is_needed_never_costs_more_than_today() -> None:
    for job in all_jobs():
        assert (
            predict(replace(job, protocol=NEEDED), CONSTANTS).push
            <= predict(replace(job, protocol=TODAY), CONSTANTS).push
        ), job


def test_the_parts_of_a_push_are_all_of_it() -> None:
    for job in all_jobs():
        prediction = predict(job, CONSTANTS)
        assert sum(prediction.parts().values()) == pytest.approx(prediction.push), job


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.system}: {case.what}")
def test_published_results_lie_within_the_stated_factors(case: Published) -> None:
    least, most = case.share.factors
    assert least <= predicted_s(case, CONSTANTS) / case.seconds <= most
    assert case.address.startswith("https://")


def test_published_results_are_of_several_systems() -> None:
    assert len({case.address for case in CASES}) >= 3


def test_docs_hold_what_the_program_prints() -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    by_name = tables(CONSTANTS)
    for name in by_name:
        assert f"<!-- table: {name} -->" in page
    assert fill(page, by_name) == page, "run `python -m benchmarks.simulate_fleet --docs`"


def test_filling_replaces_a_table_and_nothing_else() -> None:
    page = "before\n<!-- table: one -->\nold\n<!-- end -->\nafter\n"
    assert fill(page, {"one": "new\n"}) == "before\n<!-- table: one -->\nnew\n<!-- end -->\nafter\n"
    with pytest.raises(KeyError, match="one"):
        fill(page, {})


def test_tables_have_columns_of_one_width() -> None:
    lines = table(("a", "long head"), [("wide cell", "b")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2] == "| wide cell | b         |"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0"), (9.94, "9.9"), (12.3, "12"), (1200, "20 min"), (7200 * 5.6, "11 h")]
)
def test_seconds_are_short(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_models_get_the_gpus_that_they_need() -> None:
    assert [workers_for(model, IB) for model in MODELS.values()] == [1, 1, 2, 8, 16]
    assert trainer_ranks_for(MODELS["1T"], IB) == 256
    for model in MODELS.values():
        assert model.nbytes / workers_for(model, IB) <= IB.gpu_bytes / 2


def stopping(job: Job) -> set[str]:
    return {limit.name for limit in limits(predict(job, CONSTANTS), CONSTANTS) if limit.stops}


def test_limits_name_what_stops_a_push() -> None:
    assert stopping(job_for(MODELS["8B"], 1, IB, Transport.NCCL)) == set()
    assert stopping(job_for(MODELS["1T"], 1, IB, Transport.NCCL)) == {"one machine"}
    assert stopping(job_for(MODELS["8B"], 300, IB, Transport.GLOO)) == {"rendezvous"}
    assert stopping(job_for(MODELS["0.5B"], 2000, IB, Transport.GLOO)) == {"rendezvous", "rendezvous message"}
    assert "bucket" in stopping(job_for(MODELS["8B"], 1000, IB, Transport.HTTP))
    many = replace(MODELS["8B"], tensors=600_000)
    assert stopping(job_for(many, 1, IB, Transport.NCCL)) == {"manifest"}


def test_limits_name_what_makes_a_push_slow() -> None:
    prediction = predict(job_for(MODELS["235B"], 1000, IB, Transport.NCCL), CONSTANTS)
    slow = [limit.name for limit in limits(prediction, CONSTANTS) if not limit.stops]
    assert slow == ["control calls", "post-load pause", "failing GPUs"]


def test_a_job_must_make_sense() -> None:
    with pytest.raises(ValueError, match="shm needs all workers on one machine of 8 GPUs, got 16"):
        predict(job_for(MODELS["235B"], 2, IB, Transport.SHM), CONSTANTS)
    with pytest.raises(ValueError, match="servers"):
        predict(job_for(MODELS["8B"], 0, IB, Transport.NCCL), CONSTANTS)


def test_the_data_file_says_where_each_constant_comes_from(tmp_path: Path) -> None:
    for origin in data.origins():
        assert origin.what
        assert origin.source.startswith("https://") or origin.kind != "published", origin
        assert origin.source.startswith("benchmarks/") or origin.kind != "measured", origin
    content = json.loads(data.PATH.read_text(encoding="utf-8"))
    file = tmp_path / "constants.json"

    def refused(changed: object) -> str:
        file.write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(ValueError, match=r"\w") as caught:
            data.load(file)
        return str(caught.value)

    assert "['gloo_bps']" in refused({name: entry for name, entry in content.items() if name != "gloo_bps"})
    assert "['guess']" in refused(content | {"guess": content["gloo_bps"]})
    assert "hearsay" in refused(content | {"gloo_bps": content["gloo_bps"] | {"kind": "hearsay"}})
    assert "-1.0" in refused(content | {"gloo_bps": content["gloo_bps"] | {"value": -1.0}})


def test_a_real_rendezvous_asks_its_store_as_often_as_the_model_says() -> None:
    """Guards the constants that say where Gloo groups end: whoever changes the rendezvous must measure again."""
    workers = 6
    program = f"from benchmarks.scale.measure import rendezvous; print(rendezvous({workers})['requests'])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    job = Job(Model("any", 1, 1, 1), workers, Site("any", 1, 1, True, ""), Transport.GLOO, 1, 1)
    expected = rendezvous_s(job, CONSTANTS) / CONSTANTS.store_request_s
    assert int(done.stdout) == pytest.approx(expected, rel=0.35)


def test_command_line_tells_one_push(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_fleet.main(["--model", "1T", "--servers", "1000"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("1T to 1000 servers of 16 GPUs, 256 trainer ranks\n")
    assert "stops: one machine" in told
    with pytest.raises(SystemExit):
        simulate_fleet.main(["--model", "1T", "--servers", "1000", "--transport", "shm"])
    assert "shm needs all workers on one machine" in capsys.readouterr().err


def test_command_line_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_fleet.main(["--site", "eth-25", "--transport", "http"]) == 0
    told = capsys.readouterr().out
    assert "Seconds of a push over http on eth-25" in told
    assert "Held against what others published" in told


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(tmp_path / "scale.png", IB, CONSTANTS)
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
