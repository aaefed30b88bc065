"""The command line, through typer's runner and as a real process, against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Response
from safetensors.torch import save_file
from typer.testing import CliRunner

from support.contract_server import TOKEN, ContractServer
from weightpush_client import PushPhase, PushProgress, WeightPusher, cli_serve, cli_watch
from weightpush_client.cli import app
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import Deadlines

WEIGHTS = {f"layer.{number}": torch.full((64, 64), float(number)) for number in range(8)}
PROGRAM = [sys.executable, "-c", "from weightpush_client.cli import main; main()"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ContractServer]:
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", TOKEN)
    server = ContractServer([TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()])
    yield server
    server.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


def run(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert TOKEN not in result.output
    return result.exit_code, result.stdout, result.stderr


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return f"127.0.0.1:{unused.getsockname()[1]}"


# help


@pytest.mark.parametrize("command", [(), ("push",), ("status",), ("watch",), ("verify",), ("abort",), ("rollback",)])
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"\n  weightpush {command[0] if command else 'push'} " in out.replace("\n    ", "\n  ")
    assert "localhost:8000" in out


def test_the_overview_names_every_command() -> None:
    _, out, _ = run("--help")
    for command in ("serve", "push", "rollback", "status", "watch", "verify", "abort"):
        assert f"\n  {command} " in out
    assert "Exit codes" in out


def test_wrong_usage_is_two(checkpoint: Path) -> None:
    assert run("push", checkpoint)[0] == 2
    assert run("nonsense")[0] == 2
    code, _, err = run("push", checkpoint, "--url", "nohost", "--version", "v1")
    assert (code, err.strip()) == (
        2,
        "error: 'nohost' has no port: write host:port, or a full URL [invalid_request]",
    )
    assert run("push", checkpoint, "--url", "h:1", "--version", "v1", "--transport", "pigeon")[0] == 2


# push


def test_push(server: ContractServer, checkpoint: Path) -> None:
    code, out, err = run(
        *("push", checkpoint, "--url", server.url, "--version", "step-1", "--bucket-mb", "0.02"),
        *("--in-flight", "abort", "--drain-timeout", "3"),
    )
    assert (code, err) == (0, "")
    assert out.startswith("pushed step-1 in ")
    assert "8 tensors, 0.1 MB in 8 buckets over http" in out
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in WEIGHTS.items())
    begin = server.begins[0]
    assert (begin.weight_version, begin.in_flight, begin.deadlines) == ("step-1", "abort", Deadlines(drain_s=3))
    code, out, _ = run("push", checkpoint, "--url", server.url, "--version", "step-2", "--quiet")
    assert (code, out) == (0, "")


def test_a_partial_push(server: ContractServer, tmp_path: Path) -> None:
    name = next(iter(WEIGHTS))
    save_file({name: WEIGHTS[name]}, tmp_path / "model.safetensors")
    push = ("push", tmp_path, "--url", server.url, "--version", "v1")
    assert "missing" in run(*push)[2]
    assert run(*push, "--partial")[0] == 0
    assert [begin.partial for begin in server.begins] == [False, True]


def test_the_token_from_a_file(
    server: ContractServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTPUSH_CONTROL_TOKEN")
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    push = ("push", checkpoint, "--url", server.url, "--version", "v1")
    code, _, err = run(*push)
    assert code == 1
    assert err.startswith(f"error: {server.url}: the control token is missing or wrong [unauthorized]")
    assert run(*push, "--token-file", secret)[0] == 0
    assert run(*push, "--token", TOKEN)[0] == 0
    code, _, err = run(*push, "--token-file", secret, "--token", "x")
    assert (code, err.strip()) == (2, "error: give a token or a token file, not both [invalid_request]")
    assert run(*push, "--token-file", tmp_path / "nowhere")[0] == 2
    secret.write_text(" \n")
    assert "is empty" in run(*push, "--token-file", secret)[2]


def test_a_refused_push_lists_the_offenders_one_a_line(server: ContractServer, tmp_path: Path) -> None:
    save_file({**WEIGHTS, "layer.2": torch.zeros(3), "[red]x": torch.zeros(1)}, tmp_path / "model.safetensors")
    code, out, err = run("push", tmp_path, "--url", server.url, "--version", "v1")
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0] == f"error: {server.url}: the manifest does not fit [manifest_rejected]"
    assert "  problems:" in lines
    assert "    kind wrong_shape, name layer.2, expected [64, 64], given [3]" in lines
    assert "    kind unknown, name [red]x, given float32 [1]" in lines


@pytest.mark.case("C44")
def test_a_push_of_nothing_fails_before_any_server_is_asked(server: ContractServer, tmp_path: Path) -> None:
    code, _, err = run("push", tmp_path, "--url", server.url, "--version", "v1")
    assert code == 1
    assert "holds no .safetensors file" in err
    assert server.calls == []


def test_a_push_from_disk_reads_nothing_here(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    push = ("push", "sub/../there", "--url", server.url, "--version", "v1", "--from-disk")
    code, out, err = run(*push, "--in-flight", "keep", "--drain-timeout", "3")
    assert (code, err) == (0, "")
    assert f"loaded from {tmp_path}/there\n{server.url} serves v1: 1 tensors" in out
    assert run(*push, "--mode", "direct", "--quiet")[:2] == (0, "")
    first, second = server.loads
    assert (first.path, first.weight_version, first.mode) == (f"{tmp_path}/there", "v1", "staged")
    assert (first.in_flight, first.deadlines, second.mode) == ("keep", Deadlines(drain_s=3), "direct")
    assert first.update_id != second.update_id
    code, _, err = run(*push, "--partial")
    assert code == 2
    assert "leave --partial out" in err
    assert server.calls == ["load", "load"]
    assert first.digests == {}


def test_a_push_from_disk_may_be_checked_against_what_lies_here(server: ContractServer, checkpoint: Path) -> None:
    push = ("push", checkpoint, "--url", server.url, "--version", "v1", "--from-disk", "--check")
    assert run(*push)[0] == 0
    assert server.loads[0].digests == {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}


def test_an_unreachable_server_is_two(checkpoint: Path) -> None:
    code, _, err = run("push", checkpoint, "--url", dead_url(), "--version", "v1")
    assert code == 2
    assert "cannot connect" in err
    assert err.count("\n") == 1


@pytest.mark.case("C14")
def test_ctrl_c_in_a_real_process_aborts_the_update(server: ContractServer, checkpoint: Path) -> None:
    reached = threading.Event()

    async def hold() -> None:
        reached.set()
        await asyncio.sleep(60)

    server.hooks["stream"] = hold
    process = subprocess.Popen(
        [*PROGRAM, "push", str(checkpoint), "--url", server.url, "--version", "v1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert reached.wait(40)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert list(server.ended.values()) == ["aborted"]


# status


def test_status(server: ContractServer) -> None:
    code, out, _ = run("status", server.url)
    assert code == 0
    for text in (server.url, "yes", "serving", "default"):
        assert text in out
    code, out, _ = run("status", server.url, "--json")
    (entry,) = json.loads(out)
    assert (code, entry["url"], entry["status"]["state"]) == (0, server.url, "serving")
    # No token is needed.
    assert run("status", server.url, "--token", "wrong")[0] == 0


def test_status_of_servers_that_fail_or_are_gone(server: ContractServer, checkpoint: Path) -> None:
    async def fail() -> None:
        if server.calls.count("stream") == 2:
            server.fail(WeightPushError(ErrorCode.LANDING_FAILED, "no room"))

    server.hooks["stream"] = fail
    code, _, err = run("push", checkpoint, "--url", server.url, "--version", "v1", "--bucket-mb", "0.02")
    assert code == 1
    assert "no room [landing_failed]" in err
    assert "  server state: failed" in err
    code, out, _ = run("status", server.url)
    assert code == 1
    assert f"{server.url}: needs a complete push (" in out
    assert "no room [landing_failed]" in out
    assert "(was " in out
    gone = dead_url()
    code, out, _ = run("status", server.url, gone)
    assert code == 2
    assert "no answer" in out
    assert f"http://{gone}: cannot connect" in out
    code, out, _ = run("status", server.url, gone, "--json")
    assert code == 2
    assert [entry.get("status", entry.get("error"))["state"] for entry in json.loads(out)] == ["failed", None]


def test_a_fleet_in_which_one_server_fails(server: ContractServer, checkpoint: Path) -> None:
    """The exit code tells a push that not all took from one that all took, and the status who is behind."""
    other = ContractServer([TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()], token=None)
    try:

        async def refuse() -> None:
            raise WeightPushError(ErrorCode.RELOAD_REFUSED, "not this one")

        other.hooks["begin"] = refuse
        both = ("--url", server.url, "--url", other.url)
        code, _, err = run("push", checkpoint, *both, "--version", "v1")
        assert (code, "not this one [reload_refused]" in err) == (1, True)
        code, out, _ = run("push", checkpoint, *both, "--version", "v2", "--on-server-failure", "exclude")
        assert code == 3
        assert f"{other.url}: EXCLUDED, serving: not this one [reload_refused]" in out
        code, out, _ = run("status", server.url, other.url)
        assert (code, f"1 of 2 serve v2; behind: {other.url} (serves default)" in out) == (0, True)
        other.hooks.clear()
        code, out, _ = run("push", checkpoint, *both, "--version", "v3", "--on-server-failure", "exclude")
        assert (code, "EXCLUDED" in out) == (0, False)
        assert "all 2 serve v3" in run("status", server.url, other.url)[1]
    finally:
        other.close()
    code, _, err = run("push", checkpoint, *both, "--version", "v4", "--from-disk", "--on-server-failure", "exclude")
    assert (code, "leave --on-server-failure out" in err) == (2, True)


# watch and abort


def push_in_thread(server: ContractServer, **options: Any) -> threading.Thread:
    """Push slowly, one tensor a bucket, so that somebody can watch."""

    def slow(progress: PushProgress) -> None:
        if progress.phase is PushPhase.STREAM:
            time.sleep(0.05)

    def push() -> None:
        with WeightPusher(server.url, transport="http", bucket_bytes=1) as pusher:
            try:
                pusher.push(WEIGHTS, weight_version="step-9", progress=slow)
            except WeightPushError:
                return

    thread = threading.Thread(target=push)
    thread.start()
    return thread


def test_watch_once_follows_an_update_to_its_commit(server: ContractServer) -> None:
    thread = push_in_thread(server)
    code, out, err = run("watch", server.url, "--once")
    thread.join()
    assert (code, err) == (0, "")
    assert "over http" in out
    assert "committed step-9: 0.1 MB in 0.50 s, not serving for 0.25 s" in out


def test_watch_once_says_how_an_update_failed(server: ContractServer) -> None:
    async def fail() -> None:
        if server.calls.count("stream") == 5:
            server.fail(WeightPushError(ErrorCode.LANDING_FAILED, "no room"))

    server.hooks["stream"] = fail
    thread = push_in_thread(server)
    code, out, _ = run("watch", server.url, "--once")
    thread.join()
    assert code == 1
    assert "failed: no room [landing_failed]" in out


def test_watch_reconnects(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_watch, "_PAUSES_S", (0.01, 0.01))

    async def end_twice() -> Response | None:
        return Response("", media_type="text/event-stream") if server.calls.count("events") <= 2 else None

    server.hooks["events"] = end_twice
    thread = push_in_thread(server)
    assert run("watch", server.url, "--once")[0] == 0
    thread.join()
    assert server.calls.count("events") == 3


def test_watch_gives_up(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_watch, "_PAUSES_S", (0.01, 0.01))
    code, _, err = run("watch", dead_url())
    assert code == 2
    assert "gave up after 2 tries to reconnect" in err
    code, _, err = run("watch", server.url, "--token", "wrong")
    assert code == 1
    assert "[unauthorized]" in err


def test_rollback(server: ContractServer, checkpoint: Path) -> None:
    code, _, err = run("rollback", server.url)
    assert code == 1
    assert "[no_copy]" in err
    for version in ("v1", "v2"):
        assert run("push", checkpoint, "--url", server.url, "--version", version, "--mode", "staged")[0] == 0
    code, out, err = run("rollback", server.url, "--in-flight", "abort")
    assert (code, err) == (0, "")
    assert out.startswith(f"{server.url} serves v1: ")
    assert "4.0 MB in " in out
    assert "not serving for 0.25 s, fingerprint ffff" in out
    assert server.rollbacks[-1].in_flight == "abort"


def test_abort(server: ContractServer) -> None:
    code, out, _ = run("abort", server.url)
    assert (code, out) == (0, "no update runs; nothing to abort\n")
    release = threading.Event()

    async def hold() -> None:
        await asyncio.to_thread(release.wait, 10)

    server.hooks["finish"] = hold
    thread = push_in_thread(server)
    while "finish" not in server.calls:
        time.sleep(0.01)
    code, out, _ = run("abort", server.url, "--reason", "wrong checkpoint")
    release.set()
    thread.join()
    assert code == 0
    assert out.startswith(f"aborted update {server.begins[0].update_id}; the server is failed")
    error = server.status().last_error
    assert error is not None
    assert error.message == "aborted: wrong checkpoint"


# serve


def test_serve_hands_everything_over_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    module = types.ModuleType("weightpush_server.supervisor")
    module.launch = given.append  # type: ignore[attr-defined]  # a module made here has no such attribute yet
    monkeypatch.setitem(sys.modules, "weightpush_server.supervisor", module)
    for arguments in (
        ["model", "--port", "1", "-tp", "2", "--api-key=x", "--", "--url"],
        ["--help"],
        ["--served-model-name", "a", "b", "model", "-h"],
        [],
    ):
        assert run("serve", *arguments)[0] == 0
        assert given[-1] == arguments


def test_serve_without_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_serve, "find_spec", lambda _: None)
    code, _, err = run("serve", "model")
    assert code == 2
    assert "pip install 'weightpush[server]'" in err
