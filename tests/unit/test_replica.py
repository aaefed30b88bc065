"""A replica over small real processes in place of servers: what dies comes back, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from weightpush_client import replica as replicas
from weightpush_client.replica import Replica, ReplicaSettings, ReplicaState, ReplicaStatus
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.state import ServerState
from weightpush_protocol.status import Status

HOST = "127.0.0.1"
TOKEN = "a-token-that-nobody-sees"

#: A server that answers with a status, notes its words and its token, and ends when its standard input does.
SERVER = """
import http.server, os, pathlib, signal, subprocess, sys, threading, time
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
number = len(list(folder.glob("words-*")))
(folder / f"words-{number}").write_text("\\n".join([str(os.getpid()), *words]))
(folder / f"token-{number}").write_text(os.environ.get("WEIGHTPUSH_CONTROL_TOKEN", ""))
print(f"server {number} starts", flush=True)
if (folder / "port-taken").exists() and number == 0:
    sys.exit("OSError: [Errno 98] Address already in use")
if (folder / "broken").exists():
    sys.exit("no such model")
while (folder / "loading").exists():
    time.sleep(0.05)
if (folder / "stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if (folder / "with-engine").exists():  # It keeps the log open for a while after the first process.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); print('the last word', flush=True)"])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (folder / "status").read_bytes()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

server = http.server.HTTPServer((words[2], int(words[4])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
os._exit(9)
"""


def until(check: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (found := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


class Made:
    """Replicas over ``folder``, where a test puts what their servers shall do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "server.py").write_text(SERVER)
        status = Status(
            protocol="1.0",
            instance_id="i",
            state=ServerState.AWAITING_WEIGHTS,
            serving=False,
            weight_version="default",
        )
        (folder / "status").write_text(status.model_dump_json())
        self.replicas: list[Replica] = []

    def command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, str(self.folder / "server.py"), str(self.folder), *words]

    def __call__(self, *, restarted: bool = False, **settings: Any) -> Replica:
        made = ReplicaSettings(**{"index": 3, "model": "m", "token": TOKEN, **settings})
        self.replicas.append(Replica(made, host=HOST, node_id="n", restarted=restarted, command=self.command))
        return self.replicas[-1]

    def words(self, number: int) -> list[str]:
        """Wait for server ``number``; return its process id and words."""
        file = self.folder / f"words-{number}"
        return until(lambda: file.exists() and file.read_text().splitlines(), f"no server {number}")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path)
    yield made
    for replica in made.replicas:
        replica.stop(0.0)


def wait_for(replica: Replica, state: ReplicaState) -> ReplicaStatus:
    until(lambda: replica.status().state is state, f"never {state}")
    return replica.status(ask_server=True)


def gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_a_server_comes_up_with_what_it_was_told(make: Made) -> None:
    replica = make(arguments=("--seed", "7"), environment={"WP_X": "1"})
    status = wait_for(replica, ReplicaState.UP)
    pid, *words = make.words(0)
    assert words == ["m", "--host", HOST, "--port", words[4], "--end-with-stdin", "--seed", "7"]
    assert status.url == f"http://{HOST}:{words[4]}"
    assert (status.index, status.node, status.node_id, status.pid) == (3, HOST, "n", int(pid))
    assert (status.restarts, status.actor_restarted, status.reason) == (0, False, None)
    assert status.server is not None
    assert status.server.state is ServerState.AWAITING_WEIGHTS
    assert str(status) == f"replica 3 (node {HOST}): up"
    assert b"WP_X=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_the_token_reaches_the_server_and_nothing_else(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", "of-somebody-else")
    status = wait_for(make(), ReplicaState.UP)
    assert (make.folder / "token-0").read_text() == TOKEN
    seen = [" ".join(make.words(0)), repr(status), repr(ReplicaSettings(0, "m", token=TOKEN))]
    assert not any(TOKEN in text for text in seen)
    wait_for(make(token=None), ReplicaState.UP)
    assert (make.folder / "token-1").read_text() == ""


@pytest.mark.parametrize("kill", ["kill_server", "SIGKILL"])
def test_a_server_that_dies_comes_back_on_its_port_and_awaits_weights(make: Made, kill: str) -> None:
    replica = make()
    before = wait_for(replica, ReplicaState.UP)
    assert before.pid is not None
    if kill == "kill_server":
        replica.kill_server()
        assert replica.status().state is ReplicaState.RESTARTING
    else:
        os.kill(before.pid, signal.SIGKILL)
    until(lambda: replica.status().restarts == 1, "no restart")
    after = wait_for(replica, ReplicaState.UP)
    assert after.url == before.url
    assert after.pid != before.pid
    assert gone(before.pid)
    assert make.words(1)[1:] == [*make.words(0)[1:], "--await-weights"]
    assert after.reason == "the server was killed by SIGKILL; it is started again in 1 s"
    assert after.log == "server 0 starts"


def test_a_server_that_never_was_up_is_not_tried_again(make: Made) -> None:
    (make.folder / "broken").touch()
    status = wait_for(make(), ReplicaState.GAVE_UP)
    assert status.reason == "the server exited with 1 before it was up"
    assert status.log.splitlines() == ["server 0 starts", "no such model"]
    assert status.pid is None
    assert not (make.folder / "words-1").exists()


def test_a_server_that_keeps_dying_is_given_up(make: Made) -> None:
    replica = make(quick_crashes=1)
    wait_for(replica, ReplicaState.UP)
    (make.folder / "broken").touch()
    replica.kill_server()
    status = wait_for(replica, ReplicaState.GAVE_UP)
    assert status.reason == "the server exited with 1 before it was up, 2 times in a row"
    assert "no such model" in status.log
    assert (status.restarts, status.pid) == (1, None)
    replica.kill_server()  # Harmless.


def test_a_port_that_is_taken_is_left_for_another(make: Made) -> None:
    (make.folder / "port-taken").touch()
    status = wait_for(make(), ReplicaState.UP)
    assert make.words(0)[5] != make.words(1)[5]
    assert status.url == f"http://{HOST}:{make.words(1)[5]}"
    assert "--await-weights" not in make.words(1)
    assert status.restarts == 0


def test_two_replicas_of_a_node_never_get_one_port(make: Made) -> None:
    urls = {wait_for(make(), ReplicaState.UP).url for _ in range(5)}
    assert len(urls) == 5


def test_a_replica_that_was_there_before_awaits_weights_at_once(make: Made) -> None:
    assert wait_for(make(restarted=True, arguments=("--await-weights",)), ReplicaState.UP).actor_restarted
    assert make.words(0)[1:].count("--await-weights") == 1
    wait_for(make(restarted=True), ReplicaState.UP)
    assert make.words(1)[-1] == "--await-weights"


def test_a_server_that_does_not_come_up_says_what_it_does(make: Made) -> None:
    """Whoever waits for it in vain wants to know why."""
    (make.folder / "loading").touch()
    replica = make()
    until(lambda: replica.status().log, "no log")
    assert (replica.status().state, replica.status().log) == (ReplicaState.STARTING, "server 0 starts")
    (make.folder / "loading").unlink()
    assert wait_for(replica, ReplicaState.UP).log == ""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_leaves_nothing(make: Made, stubborn: bool, stopped: bool) -> None:
    if stubborn:
        (make.folder / "stubborn").touch()
    replica = make()
    pid = wait_for(replica, ReplicaState.UP).pid
    assert pid is not None
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    assert replica.stop(0.2 if stubborn else 60)
    assert gone(pid)
    assert replica.status().state is ReplicaState.STOPPED
    assert replica.stop(1.0)
    assert not (make.folder / "words-1").exists()


def test_stop_in_the_pause_before_a_restart(make: Made) -> None:
    replica = make()
    wait_for(replica, ReplicaState.UP)
    replica.kill_server()
    assert replica.stop(5.0)
    assert replica.status().state is ReplicaState.STOPPED
    assert not (make.folder / "words-1").exists()


def test_a_server_is_gone_when_its_last_process_is(make: Made) -> None:
    (make.folder / "with-engine").touch()
    replica = make()
    wait_for(replica, ReplicaState.UP)
    replica.kill_server()
    until(lambda: replica.status().log, "no end")
    assert replica.status().log.splitlines()[-1] == "the last word"


def test_a_machine_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "find_spec", lambda _: None)
    with pytest.raises(WeightPushError, match="vLLM is not installed there") as missing:
        Replica(ReplicaSettings(0, "m"), host=HOST)
    assert missing.value.code is ErrorCode.LAUNCH_FAILED


def test_the_command_is_that_of_the_supervisor() -> None:
    assert replicas.serve_command(["m"]) == [sys.executable, "-m", "weightpush_server.supervisor", "m"]
