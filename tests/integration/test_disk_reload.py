"""``POST /reload``: a directory on the server's own disk goes live as a push does, or is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from integration.conftest import PROMPTS, TOKEN, Checkpoints, ColdStart
from support.raw import error_of, read_tensors
from support.server import ServerProcess
from weightpush_client import PushError, WeightPusher
from weightpush_client.cli import app

SHARD = "model-0000{}-of-00002.safetensors"


@dataclass(frozen=True)
class DiskServer:
    """A server that may load from ``root``, where copies of A and B lie; started on A."""

    server: ServerProcess
    root: Path
    cold_a: ColdStart

    def load(self, path: Path | str, version: str, **changes: Any) -> httpx.Response:
        with self.server.client() as client:
            return client.post("/reload", json={"path": str(path), "weight_version": version, **changes})


@pytest.fixture(scope="module")
def shared(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskServer]:
    root = tmp_path_factory.mktemp("root")
    for name, checkpoint in (("a", checkpoints.a), ("b", checkpoints.b)):
        shutil.copytree(checkpoint, root / name)
    folder = tmp_path_factory.mktemp("disk-server")
    with ServerProcess(checkpoints.a, ["--reload-root", str(root)], folder=folder, token=TOKEN) as server:
        cold = ColdStart({prompt: server.answer(prompt) for prompt in PROMPTS}, server.status()["fingerprint"])
        yield DiskServer(server, root, cold)


@pytest.fixture
def disk(shared: DiskServer) -> Iterator[DiskServer]:
    """The shared server, serving A."""
    shared.server.set_faults()
    if shared.server.status()["fingerprint"] != shared.cold_a.fingerprint:
        shared.load(shared.root / "a", "A").raise_for_status()
    yield shared
    shared.server.set_faults()


def serves(server: ServerProcess, cold: ColdStart) -> None:
    """Every bit is that of a cold start."""
    assert server.status()["state"] == "serving"
    assert server.status()["fingerprint"] == cold.fingerprint
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold.answers


def save_sharded(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write two shards and their index."""
    directory.mkdir(exist_ok=True)
    names = sorted(tensors)
    halves = {SHARD.format(1): names[::2], SHARD.format(2): names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.case("C76", "C83")
def test_a_directory_goes_live_bit_for_bit(disk: DiskServer, cold_start_b: ColdStart, mode: str) -> None:
    server = disk.server
    answer = disk.load(disk.root / "b", "B", mode=mode)
    assert answer.status_code == 200, answer.text
    assert answer.json()["fingerprint"] == cold_start_b.fingerprint
    serves(server, cold_start_b)
    status = server.status()
    assert (status["weight_version"], status["last_update"]["mode"]) == ("B", mode)
    assert status["last_update"]["transport"] == "disk"
    assert server.complete().headers["X-Weight-Version"] == "B"
    for directory, code in (("b", 0), ("a", 1)):
        verified = CliRunner().invoke(
            app, ["verify", server.url, "--against", str(disk.root / directory), "--token", TOKEN]
        )
        assert verified.exit_code == code, verified.output
    # Pushed over the network, and from shards, it is the same.
    with WeightPusher(server.url, token=TOKEN, transport="http") as pusher:
        pusher.push(disk.root / "a", weight_version="A")
    serves(server, disk.cold_a)
    sharded = save_sharded(disk.root / f"sharded-{mode}", read_tensors(disk.root / "b"))
    disk.load(sharded, "B2", mode=mode).raise_for_status()
    serves(server, cold_start_b)


def test_from_the_command_line_and_from_python(disk: DiskServer, cold_start_b: ColdStart) -> None:
    arguments = ["push", str(disk.root / "b"), "--url", disk.server.url, "--version", "B", "--from-disk"]
    done = CliRunner().invoke(app, [*arguments, "--token", TOKEN])
    assert done.exit_code == 0, done.output
    assert f"loaded from {disk.root / 'b'}" in done.output
    assert f"{disk.server.url} serves B: 25 tensors" in done.output
    serves(disk.server, cold_start_b)
    with WeightPusher(disk.server.url, token=TOKEN) as pusher:
        (answer,) = pusher.push_from_disk(disk.root / "a", weight_version="A")
        assert answer.fingerprint == disk.cold_a.fingerprint
        with pytest.raises(PushError, match="does not lead below") as refused:
            pusher.push_from_disk("/etc", weight_version="A")
    assert (refused.value.code, refused.value.server) == ("path_refused", disk.server.url)
    serves(disk.server, disk.cold_a)


def test_a_repeated_call_is_the_same_update(disk: DiskServer) -> None:
    body = {"update_id": f"disk-{time.monotonic_ns()}", "mode": "staged"}
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: disk.load(disk.root / "b", "B", **body), range(3)))
    answers.append(disk.load(disk.root / "b", "B", **body))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    # The same id for something else is a mistake, not a repetition.
    other = disk.load(disk.root / "a", "A", **body)
    assert (other.status_code, error_of(other)["code"]) == (409, "stale_update")
    assert disk.server.status()["weight_version"] == "B"


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_files_with_names_of_any_bytes_and_length_end_in_a_refusal(disk: DiskServer, mode: str) -> None:
    before = disk.server.status()["weight_version"]
    directory = disk.root / f"odd-{mode}"
    directory.mkdir()
    damaged = directory / os.fsdecode(b"m\xff.safetensors")
    damaged.write_bytes(b"\x10")
    first = disk.load(directory, "odd", mode=mode)
    damaged.unlink()
    indexed = []
    for shard in ("\ud800.safetensors", "x" * 300_000 + ".safetensors"):
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        indexed.append(disk.load(directory, "odd", mode=mode))
    for answer in (first, *indexed):
        assert (answer.status_code, error_of(answer)["code"]) == (422, "checkpoint_damaged"), answer.text[:300]
    status = disk.server.status()
    assert (status["state"], status["weight_version"], status["update"]) == ("serving", before, None)


@pytest.mark.case("C85")
@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("../../etc", "path_refused"),
        ("/etc", "path_refused"),
        ("{root}/../../../etc", "path_refused"),
        ("file://{root}/b", "path_refused"),
        ("http://127.0.0.1:9/b", "path_refused"),
        ("Qwen/Qwen3-0.6B", "path_refused"),
        ("{root}/out", "path_refused"),
        ("{root}/b\0", "path_refused"),
        ("{root}/nothing", "path_refused"),
        ("x" * 5000, "invalid_request"),
        ("x" * 2**20, "invalid_request"),
        ("", "invalid_request"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(disk: DiskServer, path: str, code: str) -> None:
    if not (disk.root / "out").is_symlink():
        (disk.root / "out").symlink_to("/etc")
    answer = disk.load(path.replace("{root}", str(disk.root)), "X")
    assert (answer.status_code // 100, error_of(answer)["code"]) == (4, code)
    assert "root:" not in answer.text
    assert TOKEN not in answer.text
    status = disk.server.status()
    assert (status["state"], status["fingerprint"]) == ("serving", disk.cold_a.fingerprint)


def _lacks_a_shard(directory: Path) -> None:
    (directory / SHARD.format(2)).unlink()


def _truncated(directory: Path) -> None:
    file = directory / SHARD.format(2)
    os.truncate(file, file.stat().st_size - 8)


def _index_leads_out(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../b/model.safetensors"
    index.write_text(json.dumps(content))


def _empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def _another_shape(directory: Path) -> None:
    tensors = read_tensors(directory.parent / "b")
    save_sharded(directory, {**tensors, "model.norm.weight": torch.ones(3, dtype=torch.bfloat16)})


def _one_tensor_less(directory: Path) -> None:
    tensors = read_tensors(directory.parent / "b")
    del tensors["model.norm.weight"]
    save_sharded(directory, tensors)


def _another_dtype(directory: Path) -> None:
    save_sharded(directory, {name: tensor.float() for name, tensor in read_tensors(directory.parent / "b").items()})


@pytest.mark.case("C44")
@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (_lacks_a_shard, "checkpoint_damaged", SHARD.format(2)),
        (_truncated, "checkpoint_damaged", SHARD.format(2)),
        (_index_leads_out, "checkpoint_damaged", "../b/model.safetensors"),
        (_empty, "checkpoint_damaged", "holds no .safetensors file"),
        (_another_shape, "manifest_rejected", "model.norm.weight"),
        (_one_tensor_less, "manifest_rejected", "model.norm.weight"),
        (_another_dtype, "manifest_rejected", "wrong_dtype"),
    ],
)
def test_a_checkpoint_that_will_not_do_changes_nothing(
    disk: DiskServer, tmp_path: Path, damage: Any, code: str, named: str, mode: str
) -> None:
    directory = disk.root / f"bad-{tmp_path.name}"
    save_sharded(directory, read_tensors(disk.root / "b"))
    damage(directory)
    answer = disk.load(directory, "bad", mode=mode)
    assert (answer.status_code, error_of(answer)["code"]) == (422, code), answer.text
    assert named in answer.text
    assert error_of(answer)["state"] == "serving"
    status = disk.server.status()
    assert status["weight_version"] != "bad"
    assert status["last_error"]["code"] == code
    serves(disk.server, disk.cold_a)


@pytest.mark.case("C77")
def test_the_file_is_followed_not_its_name(disk: DiskServer, cold_start_b: ColdStart) -> None:
    """Overwritten in place with the same name, size and time; then switched by a link."""
    directory = shutil.copytree(disk.root / "a", disk.root / "followed")
    disk.load(directory, "1").raise_for_status()
    serves(disk.server, disk.cold_a)
    file = directory / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.write((disk.root / "b" / "model.safetensors").read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    disk.load(directory, "2").raise_for_status()
    serves(disk.server, cold_start_b)
    link = disk.root / "latest"
    for name, cold in (("a", disk.cold_a), ("b", cold_start_b)):
        (disk.root / "next").symlink_to(disk.root / name)
        (disk.root / "next").rename(link)
        disk.load(link, name).raise_for_status()
        serves(disk.server, cold)


@pytest.mark.case("C104")
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_writer_at_work_is_never_half_served(disk: DiskServer, cold_start_b: ColdStart, mode: str) -> None:
    """Somebody replaces the two shards, A by B, B by A, again and again, and is slow between the two.

    A load that meets a file younger than a tenth of a second waits until it is older, and sees the second change. Only
    a writer that sleeps longer half-way leaves a directory that looks whole.
    """
    server = disk.server
    directory = save_sharded(disk.root / f"busy-{mode}", read_tensors(disk.root / "a"))
    whole = {name: save_sharded(disk.root / f"busy-{mode}-{name}", read_tensors(disk.root / name)) for name in "ab"}
    stop, replacing, half_s = threading.Event(), threading.Event(), list[float]()

    def writer() -> None:
        turn = 0
        while not stop.is_set():
            source = whole["ba"[turn % 2]]
            for number in (1, 2):
                shutil.copy(source / SHARD.format(number), directory / f"new-{number}")
            replacing.set()
            began = time.monotonic()
            (directory / "new-1").rename(directory / SHARD.format(1))
            time.sleep(0.03)
            (directory / "new-2").rename(directory / SHARD.format(2))
            half_s.append(time.monotonic() - began)
            replacing.clear()
            turn += 1
            stop.wait(0.6)

    thread = threading.Thread(target=writer)
    thread.start()
    outcomes = set()
    try:
        deadline = time.monotonic() + 120
        while outcomes != {"whole", "refused"}:
            assert time.monotonic() < deadline, outcomes
            if "refused" not in outcomes:
                replacing.wait(5)
            answer = disk.load(directory, "busy", mode=mode)
            if answer.status_code == 200:
                pure = answer.json()["fingerprint"] in (disk.cold_a.fingerprint, cold_start_b.fingerprint)
                assert pure or max(half_s) > 0.09
                outcomes.add("whole")
            else:
                assert error_of(answer)["code"] == "files_changed", answer.text
                outcomes.add("refused")
            state = server.status()["state"]
            assert state == "serving" if mode == "staged" else state in ("serving", "failed")
    finally:
        stop.set()
        thread.join()
    disk.load(disk.root / "b", "B").raise_for_status()
    serves(server, cold_start_b)


@pytest.mark.case("C104")
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_directory_that_is_half_old_is_told_by_its_digests(
    disk: DiskServer, cold_start_b: ColdStart, mode: str
) -> None:
    """The writer died between the two shards, long ago: only who knows what should be there can tell."""
    weights = {name: read_tensors(disk.root / name) for name in "ab"}
    directory = save_sharded(disk.root / f"half-{mode}", weights["a"])
    whole = save_sharded(disk.root / f"half-{mode}-b", weights["b"])
    shutil.copy(whole / SHARD.format(1), directory)
    with WeightPusher(disk.server.url, token=TOKEN) as pusher:
        with pytest.raises(PushError, match="or is not wholly written") as refused:
            pusher.push_from_disk(directory, weight_version="B", weights=weights["b"], mode=mode)
        assert refused.value.code == "digest_mismatch"
        assert refused.value.state == "serving"
        serves(disk.server, disk.cold_a)
        shutil.copy(whole / SHARD.format(2), directory)
        pusher.push_from_disk(directory, weight_version="B", weights=weights["b"], mode=mode)
    serves(disk.server, cold_start_b)


@pytest.mark.case("C104")
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_file_overwritten_while_it_lands_is_not_served(disk: DiskServer, cold_start_b: ColdStart, mode: str) -> None:
    """Landing is slow, and the file is written to meanwhile: in direct mode that fails, in staged it is too late."""
    directory = shutil.copytree(disk.root / "b", disk.root / f"overwritten-{mode}")
    other = (disk.root / "a" / "model.safetensors").read_bytes()
    disk.server.set_faults(slow_stored_ms=1500)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(disk.load, directory, "B", mode=mode)
        deadline = time.monotonic() + 60
        while (disk.server.status()["update"] or {}).get("phase") != "landing":
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with (directory / "model.safetensors").open("r+b") as file:
            file.write(other)
        answer = loading.result()
    disk.server.set_faults()
    if mode == "staged":
        assert answer.status_code == 200, answer.text
        serves(disk.server, cold_start_b)
        return
    assert (answer.status_code, error_of(answer)["code"]) == (409, "files_changed")
    assert error_of(answer)["state"] == "failed"
    assert disk.server.complete().status_code == 503
    disk.load(disk.root / "b", "B").raise_for_status()
    serves(disk.server, cold_start_b)


def test_old_weights_serve_while_files_are_read(disk: DiskServer) -> None:
    answers: list[int] = []
    done = threading.Event()

    def traffic() -> None:
        while not done.is_set():
            answers.append(disk.server.complete(max_tokens=2).status_code)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(traffic)
        loaded = disk.load(disk.root / "b", "B")
        done.set()
        running.result()
    assert loaded.json()["pause_seconds"] < loaded.json()["seconds"]
    assert set(answers) <= {200, 503}
    assert disk.server.status()["last_update"]["phase_seconds"]["checking"] > 0


@pytest.mark.case("C24")
def test_it_needs_the_token(disk: DiskServer) -> None:
    body = {"path": str(disk.root / "b"), "weight_version": "B"}
    assert httpx.post(f"{disk.server.url}/reload", json=body, trust_env=False).status_code == 401
    with disk.server.client() as client:
        for wrong in ({**body, "partial": True}, {"path": body["path"]}, {**body, "mode": "magic"}):
            assert client.post("/reload", json=wrong).status_code == 422
    serves(disk.server, disk.cold_a)


def test_without_a_root_it_is_off(server: ServerProcess, checkpoints: Checkpoints) -> None:
    with server.client() as client:
        answer = client.post("/reload", json={"path": str(checkpoints.b), "weight_version": "B"})
    assert (answer.status_code, error_of(answer)["code"]) == (422, "disk_reload_off")
    assert "--reload-root" in error_of(answer)["message"]
    assert server.status()["last_error"] is None
