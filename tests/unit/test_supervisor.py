"""The supervisor over small real processes: whoever is killed, nothing is left, and what should come back does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from weightpush_server import supervisor
from weightpush_server.processes import describe_exit, exit_status
from weightpush_server.rundir import RunDirectory
from weightpush_server.supervisor import RestartBudget

#: A server of three generations: it spawns an engine, which spawns a worker; both leave its session and ignore SIGTERM.
#: It notes what it is asked, and with which arguments it was started.
SERVER = """
import multiprocessing.shared_memory, os, pathlib, signal, subprocess, sys, time
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
run = pathlib.Path(os.environ["WEIGHTPUSH_RUN_DIRECTORY"])

def note(name, text=""):
    (folder / f".{name}").write_text(text)
    (folder / f".{name}").rename(folder / name)

if words[:1] == ["worker"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    note(f"memory-{words[1]}", memory.name)
    note(f"worker-{words[1]}", str(os.getpid()))
    time.sleep(600)
if words[:1] == ["engine"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(f"engine-{words[1]}", str(os.getpid()))
    subprocess.run([sys.executable, __file__, str(folder), "worker", words[1]], start_new_session=True)
    sys.exit()

number = len(list(folder.glob("server-*")))
if "--refuse" in words:
    sys.exit(2)
(run / "state").touch()
engine = subprocess.Popen([sys.executable, __file__, str(folder), "engine", str(number)], start_new_session=True)
while not (folder / f"worker-{number}").exists():
    time.sleep(0.01)

def stop(got, _):
    note(f"signal-{number}", signal.Signals(got).name)
    if "--stubborn" not in words:
        engine.kill()
        sys.exit(5)

for asked in (signal.SIGTERM, signal.SIGINT):  # As vLLM: SIGHUP would kill it.
    signal.signal(asked, stop)
note(f"arguments-{number}", "\\n".join([str(run), *words]))
note(f"server-{number}", str(os.getpid()))
if "--leave" in words:
    sys.exit(0)
while True:
    time.sleep(0.05)
    if "--fail-with-engine" in words and engine.poll() is not None:
        sys.exit(0)
"""

#: What `weightpush serve` runs, with the small server in the real one's place.
SUPERVISOR = """
import sys
from weightpush_server import supervisor
script, folder, grace, words = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:]
restarts, rest = supervisor.read_options(words)
owner, rest = supervisor.read_owner(rest)
command = lambda restart: [sys.executable, script, folder, *rest, *(["--await-weights"] if restart else [])]
budget = supervisor.RestartBudget(restarts)
raise SystemExit(supervisor.Supervisor(command, budget, grace_s=grace, owner=owner).run())
"""

#: Long enough for a machine that other tests keep busy.
PATIENCE_S = 60


def until(check: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


class Supervised:
    """A supervisor process; notes that its servers write are read from ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "server.py"
        self.script.write_text(SERVER)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *words: str, grace_s: float = 30, before: str = "", log: int = subprocess.PIPE) -> Supervised:
        """Start it without waiting, from a shell that runs ``before`` and then becomes the supervisor.

        ``log``: where its standard error goes.
        """
        command = [sys.executable, "-c", SUPERVISOR, str(self.script), str(self.folder), str(grace_s), *words]
        if before:
            command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
        stdin = subprocess.PIPE if supervisor.END_OPTION in words else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=stdin, stderr=log, text=True, start_new_session=True)
        return self

    def hang_up(self) -> None:
        """Close its standard input, as when this process died."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def note(self, name: str) -> str:
        """Wait for a note of the server and return it."""
        file = self.folder / name
        until(file.exists, f"no note {name}")
        return file.read_text()

    def pids(self, number: int = 0) -> dict[str, int]:
        """Wait until server ``number`` is up; return all its processes and those above it."""
        assert self.process is not None
        server = int(self.note(f"server-{number}"))
        keeper = int(Path(f"/proc/{server}/stat").read_bytes().rpartition(b")")[2].split()[1])
        return {
            "supervisor": self.process.pid,
            "keeper": keeper,
            "server": server,
            "engine": int(self.note(f"engine-{number}")),
            "worker": int(self.note(f"worker-{number}")),
        }

    def run_directory(self, number: int = 0) -> Path:
        return Path(self.note(f"arguments-{number}").splitlines()[0])

    def words(self, number: int) -> list[str]:
        return self.note(f"arguments-{number}").splitlines()[1:]

    def wait(self) -> tuple[int, str]:
        """Wait until it ends; return its exit status and what it said."""
        assert self.process is not None
        _, said = self.process.communicate(timeout=PATIENCE_S)
        # What multiprocessing says about the memory of dead processes goes there, too.
        return self.process.returncode, "\n".join(line for line in said.splitlines() if line.startswith("weightpush"))

    def processes_gone(self, pids: dict[str, int], number: int = 0) -> None:
        """All processes end, and with them the run directory."""
        until(lambda: not any(map(alive, pids.values())), f"left: {[name for name, pid in pids.items() if alive(pid)]}")
        until(lambda: not self.run_directory(number).exists(), "the run directory is left")

    def nothing_left(self, pids: dict[str, int], number: int = 0) -> None:
        """All processes end, and with them the run directory and the shared memory."""
        self.processes_gone(pids, number)
        memory = Path("/dev/shm", self.note(f"memory-{number}"))
        until(lambda: not memory.exists(), "shared memory is left")


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    made = Supervised(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("victim", ["server", "keeper", "supervisor"])
def test_whoever_is_killed_nothing_is_left(supervised: Supervised, victim: str) -> None:
    pids = supervised.start().pids()
    run = supervised.run_directory()
    assert run.stat().st_mode & 0o777 == 0o700
    os.kill(pids[victim], signal.SIGKILL)
    status, said = supervised.wait()
    supervised.nothing_left(pids)
    assert status == (-signal.SIGKILL if victim == "supervisor" else 128 + signal.SIGKILL)
    if victim != "supervisor":
        assert "was killed by SIGKILL without being asked to; all of it was ended" in said


def test_what_a_shell_started_before_is_left_alone(supervised: Supervised) -> None:
    """A container's script starts a helper and then becomes the server."""
    helpers = ("helper", "daemon")
    before = f"exec 3>&2 2>/dev/null; sleep 600 3>&- & echo $! > {supervised.folder}/helper; "
    before += f"(setsid sleep 600 3>&- & echo $! > {supervised.folder}/daemon); (sleep 0.1 3>&- &); exec 2>&3 3>&-"
    pids = supervised.start(supervisor.RESTART_OPTION, "1", before=before).pids()
    helping = [int(supervised.note(name)) for name in helpers]
    try:
        os.kill(pids["keeper"], signal.SIGKILL)
        supervised.nothing_left({name: pid for name, pid in pids.items() if name != "supervisor"})
        os.kill(supervised.pids(1)["server"], signal.SIGKILL)
        supervised.wait()
        assert all(map(alive, helping))
    finally:
        for pid in helping:
            os.kill(pid, signal.SIGKILL)


def test_supervisor_and_server_killed_together(supervised: Supervised) -> None:
    pids = supervised.start().pids()
    for victim in ("server", "supervisor"):
        os.kill(pids[victim], signal.SIGKILL)
    supervised.wait()
    supervised.nothing_left(pids)


@pytest.mark.parametrize("end", ["signal", "owner", "death"])
def test_a_keeper_that_was_stopped_ends_its_server(supervised: Supervised, end: str) -> None:
    pids = supervised.start(*([supervisor.END_OPTION] if end == "owner" else [])).pids()
    os.kill(pids["keeper"], signal.SIGSTOP)
    if end == "signal":
        os.kill(pids["supervisor"], signal.SIGTERM)
    elif end == "owner":
        supervised.hang_up()
    else:
        os.kill(pids["supervisor"], signal.SIGKILL)
    status, _ = supervised.wait()
    assert status == {"signal": 5, "owner": 128 + signal.SIGKILL, "death": -signal.SIGKILL}[end]
    supervised.nothing_left(pids)


def test_a_supervisor_that_was_stopped_leaves_nothing_but_itself(supervised: Supervised) -> None:
    pids = supervised.start(supervisor.END_OPTION).pids()
    os.kill(pids["supervisor"], signal.SIGSTOP)
    supervised.hang_up()
    supervised.nothing_left({name: pid for name, pid in pids.items() if name != "supervisor"})
    os.kill(pids["supervisor"], signal.SIGCONT)
    assert supervised.wait()[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("end", ["owner", "supervisor", "server", "patience"])
def test_nobody_waits_for_a_log_that_is_not_read(supervised: Supervised, end: str) -> None:
    """A program that starts servers may hang itself, or be stopped: then the pipe of its server's log fills up."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(writer, False)
        for size in (4096, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, b"x" * size)
        os.set_blocking(writer, True)
        pids = supervised.start(supervisor.END_OPTION, "--stubborn", grace_s=1, log=writer).pids()
        if end == "owner":
            supervised.hang_up()
        else:
            victim, number = ("supervisor", signal.SIGTERM) if end == "patience" else (end, signal.SIGKILL)
            os.kill(pids[victim], number)
        # What Python itself says about shared memory does wait, so that stays.
        supervised.processes_gone(pids)
    finally:
        os.close(writer)
        os.close(reader)


def test_standard_files_that_are_closed_are_stood_in_for(supervised: Supervised) -> None:
    """The first files that it opens would get their numbers, and what is printed would be written into them."""
    pids = supervised.start(before="exec <&- >&- 2>&-").pids()
    for pid in (pids["supervisor"], pids["keeper"], pids["server"]):
        assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {os.devnull}
    os.kill(pids["supervisor"], signal.SIGTERM)
    assert supervised.wait()[0] == 5
    supervised.nothing_left(pids)


def test_a_server_that_ends_by_itself_with_zero_has_failed(supervised: Supervised) -> None:
    """As vLLM does when its engine dies."""
    pids = supervised.start("--fail-with-engine").pids()
    os.kill(pids["engine"], signal.SIGKILL)
    status, said = supervised.wait()
    assert status == 1
    assert "the server exited with 0 without being asked to" in said
    supervised.nothing_left(pids)


@pytest.mark.parametrize(
    ("asked", "got"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGTERM")],
)
def test_signals_are_passed_on_and_the_servers_status_is_returned(
    supervised: Supervised, asked: signal.Signals, got: str
) -> None:
    pids = supervised.start(supervisor.RESTART_OPTION, "3").pids()
    os.kill(pids["supervisor"], asked)
    status, said = supervised.wait()
    assert (status, said) == (5, "")
    assert supervised.note("signal-0") == got
    supervised.nothing_left(pids)


def test_a_terminals_ctrl_c_reaches_the_server_once(supervised: Supervised) -> None:
    """It goes to the whole foreground group, of which only the supervisor is a part."""
    pids = supervised.start().pids()
    group = os.getpgid(pids["supervisor"])
    assert {name for name, pid in pids.items() if os.getpgid(pid) == group} == {"supervisor"}
    os.killpg(group, signal.SIGINT)
    assert supervised.wait()[0] == 5
    assert supervised.note("signal-0") == "SIGINT"
    supervised.nothing_left(pids)


def test_a_server_that_does_not_stop_is_killed(supervised: Supervised) -> None:
    pids = supervised.start("--stubborn", grace_s=1).pids()
    os.kill(pids["supervisor"], signal.SIGTERM)
    status, said = supervised.wait()
    assert status == 128 + signal.SIGKILL
    assert "did not stop within 1 s and was killed" in said
    assert supervised.note("signal-0") == "SIGTERM"
    supervised.nothing_left(pids)


def test_a_second_ctrl_c_does_not_wait(supervised: Supervised) -> None:
    pids = supervised.start("--stubborn", grace_s=600).pids()
    os.kill(pids["supervisor"], signal.SIGINT)
    supervised.note("signal-0")
    os.kill(pids["supervisor"], signal.SIGINT)
    assert supervised.wait()[0] == 128 + signal.SIGKILL
    supervised.nothing_left(pids)


def test_restarts_await_weights_and_are_counted(supervised: Supervised) -> None:
    supervised.start(supervisor.RESTART_OPTION, "1", "--model", "m")
    first = supervised.pids(0)
    assert supervised.words(0) == ["--model", "m"]
    os.kill(first["worker"], signal.SIGKILL)
    os.kill(first["server"], signal.SIGKILL)
    second = supervised.pids(1)
    assert supervised.words(1) == ["--model", "m", "--await-weights"]
    assert supervised.run_directory(0) != supervised.run_directory(1)
    supervised.nothing_left({name: pid for name, pid in first.items() if name != "supervisor"}, 0)
    os.kill(second["server"], signal.SIGKILL)
    status, said = supervised.wait()
    assert status == 128 + signal.SIGKILL
    assert "restart 1 of 1 in 1 s. It will await weights" in said
    supervised.nothing_left(second, 1)
    assert not (supervised.folder / "server-2").exists()


def test_a_stop_during_the_pause_before_a_restart_is_heeded(supervised: Supervised) -> None:
    pids = supervised.start(supervisor.RESTART_OPTION, "1").pids()
    os.kill(pids["server"], signal.SIGKILL)
    supervised.nothing_left({name: pid for name, pid in pids.items() if name != "supervisor"})
    os.kill(pids["supervisor"], signal.SIGTERM)
    assert supervised.wait()[0] != 0


def test_it_ends_with_whoever_holds_its_standard_input(supervised: Supervised) -> None:
    pids = supervised.start(supervisor.RESTART_OPTION, "3", supervisor.END_OPTION, "--model", "m").pids()
    assert supervised.words(0) == ["--model", "m"]
    supervised.hang_up()
    status, said = supervised.wait()
    assert status == 128 + signal.SIGKILL
    assert said == "weightpush serve: standard input was closed; the server was ended"
    supervised.nothing_left(pids)
    assert not (supervised.folder / "server-1").exists()


def test_its_starter_may_die_during_the_pause_before_a_restart(supervised: Supervised) -> None:
    pids = supervised.start(supervisor.RESTART_OPTION, "3", supervisor.END_OPTION).pids()
    os.kill(pids["server"], signal.SIGKILL)
    supervised.nothing_left({name: pid for name, pid in pids.items() if name != "supervisor"})
    supervised.hang_up()
    assert supervised.wait()[0] != 0
    assert not (supervised.folder / "server-1").exists()


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, None])
def test_a_standard_input_that_cannot_close_is_refused(tmp_path: Path, stdin: int | None) -> None:
    program = "from weightpush_server import supervisor; supervisor.read_owner(['--end-with-stdin'])"
    with (tmp_path / "file").open("w+") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=file if stdin is None else stdin, capture_output=True, text=True
        )
    assert done.returncode == 2
    assert "standard input is no pipe" in done.stderr


def test_a_refused_command_line_is_not_tried_again(supervised: Supervised) -> None:
    status, said = supervised.start("--refuse", supervisor.RESTART_OPTION, "5").wait()
    assert (status, said) == (2, "")


@pytest.mark.parametrize(
    ("words", "restarts", "rest"),
    [
        ([], 0, []),
        (["m", "--restart-on-failure", "3", "--port", "1"], 3, ["m", "--port", "1"]),
        (["--restart-on-failure=2", "--", "-x"], 2, ["--", "-x"]),
        (["--help"], 0, ["--help"]),
    ],
)
def test_its_own_option_is_taken_out(words: Sequence[str], restarts: int, rest: Sequence[str]) -> None:
    assert supervisor.read_options(words) == (restarts, rest)


@pytest.mark.parametrize("value", ["-1", "x", "", "1.5"])
def test_a_wrong_number_of_restarts_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        supervisor.read_options(["m", f"--restart-on-failure={value}"])
    assert refused.value.code == 2
    assert "give the number of restarts" in capsys.readouterr().err


def test_the_budget_is_renewed_by_health() -> None:
    budget = RestartBudget(3, renew_s=100)
    assert [budget.spend(0), budget.spend(99), budget.spend(5), budget.spend(99)] == [1, 2, 4, None]
    assert budget.spend(100) == 1
    patient = RestartBudget(20)
    pauses = [patient.spend(0) for _ in range(21)]
    assert max(filter(None, pauses)) == 60
    assert pauses[-1] is None
    assert RestartBudget(0).spend(10**6) is None


def test_exit_statuses_read_as_in_a_shell() -> None:
    assert [exit_status(0), exit_status(3 << 8), exit_status(signal.SIGTERM)] == [0, 3, 143]
    assert describe_exit(143) == "was killed by SIGTERM"
    assert describe_exit(3) == "exited with 3"
    assert describe_exit(250) == "exited with 250"


def test_directories_of_killed_supervisors_are_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weightpush_server.rundir._SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    name = "vllm_dist_" + "ab" * 16
    left = RunDirectory(tmp_path / f"weightpush-{os.getuid()}-{ended.pid}-x")
    (left.path / "segments").mkdir(parents=True)
    left.note_segments(name)
    left.note_segments("../../etc/passwd")
    left.note_segments("29500")
    segment, other = tmp_path / f"{name}-tp:0-[0-1]-cpushm_0", tmp_path / f"vllm_dist_{'cd' * 16}-tp"
    segment.touch()
    other.touch()
    mine = RunDirectory.create()
    try:
        assert not left.path.exists()
        assert not segment.exists()
        assert other.exists()
        assert RunDirectory.create().path.exists()
        assert mine.path.exists()
        assert mine.up_since() is None
        mine.note_up()
        assert abs((mine.up_since() or 0) - time.time()) < PATIENCE_S
    finally:
        with suppress(OSError):
            mine.remove()
    assert not mine.path.exists()


#: Makes a run directory below the folder that it is given, which sweeps that folder; then does what is told.
MAKER = """
import os, pathlib, signal, subprocess, sys, time
from weightpush_server import rundir
rundir._SHARED_MEMORY = pathlib.Path(sys.argv[1])
made = rundir.RunDirectory.create()
if sys.argv[2] == "sweep":
    made.remove()
    sys.exit()
keeper = os.fork()
if keeper == 0:  # As the keeper does: it starts a server, and stays.
    server = subprocess.Popen(["sleep", "600"], close_fds=False)
    print(made.path, os.getpid(), server.pid, flush=True)
signal.pause()
"""


def sweep(folder: Path, *, apart: bool = False) -> None:
    """Start and end another server's supervisor, if told so in a PID namespace of its own."""
    command = [sys.executable, "-c", MAKER, str(folder), "sweep"]
    subprocess.run([*_APART, *command] if apart else command, check=True, timeout=PATIENCE_S)


_APART = ("unshare", "--pid", "--fork", "--mount-proc")


def can_live_apart() -> bool:
    try:
        return subprocess.run([*_APART, "true"], capture_output=True, timeout=PATIENCE_S).returncode == 0
    except FileNotFoundError:
        return False


def test_a_directory_is_kept_for_as_long_as_supervisor_or_keeper_live(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKER, str(tmp_path), "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path, keeper, server = owner.stdout.readline().split()
        try:
            sweep(tmp_path)
            assert Path(path, "spool").is_dir()
            owner.kill()
            owner.wait()
            sweep(tmp_path)
            assert Path(path, "spool").is_dir(), "the keeper lives"
            os.kill(int(keeper), signal.SIGKILL)
            until(lambda: not alive(int(keeper)), "the keeper is left")
            assert alive(int(server))
            sweep(tmp_path)
            assert not Path(path).exists(), "what vLLM's processes inherit must not hold it"
        finally:
            owner.kill()
            for pid in (int(keeper), int(server)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not can_live_apart(), reason="unshare --pid --mount-proc is not allowed here")
def test_a_server_in_another_pid_namespace_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Containers that share memory (``--ipc=host``) do not see each other's processes."""
    monkeypatch.setattr("weightpush_server.rundir._SHARED_MEMORY", tmp_path)
    mine = RunDirectory.create()
    try:
        sweep(tmp_path, apart=True)
        assert mine.spool.is_dir()
    finally:
        mine.remove()


def test_only_directories_of_its_own_kind_are_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weightpush_server.rundir._SHARED_MEMORY", tmp_path)
    prefix, elsewhere = f"weightpush-{os.getuid()}-1", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{prefix}-link").symlink_to(elsewhere)
    (tmp_path / f"{prefix}-file").touch()
    RunDirectory.create().remove()
    assert {found.name for found in tmp_path.iterdir()} == {"elsewhere", f"{prefix}-link", f"{prefix}-file"}
