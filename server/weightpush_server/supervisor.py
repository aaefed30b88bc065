"""``weightpush serve``: starts the server, ends all of it when any part of it dies, and starts it again if told to.

Three processes stand above vLLM's own: the *supervisor* (the one that was started; signals go here), the *keeper*, its
fork (`weightpush_server.keeper`), and the server's first process. Whichever of them is killed, the others end the rest.
All of this needs the standard library only: the supervisor is a few megabytes for as long as the server lives.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final, NoReturn

from weightpush_server.keeper import GRACE_S, STOP_SIGNALS, Keeper
from weightpush_server.processes import (
    adopt_orphans,
    describe_exit,
    end_all_children,
    exit_status,
    has_in_environment,
    say,
    session_of,
    stand_in_for_closed,
)
from weightpush_server.rundir import VARIABLE, RunDirectory
from weightpush_server.tokens import TOKEN_VARIABLE, forget_environment

RESTART_OPTION: Final = "--restart-on-failure"
AWAIT_OPTION: Final = "--await-weights"
END_OPTION: Final = "--end-with-stdin"
_USAGE: Final = 2
_RENEW_S: Final = 600.0
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
#: A Unix socket's whole path has 107 characters; vLLM adds 37.
_LONGEST_SOCKET_FOLDER: Final = 64
_STDIN: Final = 0
_LOOK_S: Final = 0.2


@dataclass
class RestartBudget:
    """How often a server that dies may be started again: ``limit`` times, renewed once it was up for ``renew_s``."""

    limit: int
    renew_s: float = _RENEW_S
    used: int = 0

    def spend(self, up_s: float) -> float | None:
        """Take one restart; return the seconds to wait before it, or ``None`` if there is none left.

        ``up_s``: how long the server was up before it died, 0 if it never was.
        """
        if up_s >= self.renew_s:
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        pause: float = _FIRST_PAUSE_S * 2 ** (self.used - 1)
        return min(pause, _LONGEST_PAUSE_S)


class Supervisor:
    """Runs servers one after another until one ends as it should, or the budget is used up.

    ``command`` makes the words of a server's command from whether it is a restart; ``secrets`` are variables for its
    environment alone. ``owner``: a pipe whose closing ends the server at once. Belongs to a process's main thread.
    """

    def __init__(
        self,
        command: Callable[[bool], Sequence[str]],
        budget: RestartBudget,
        *,
        grace_s: float = GRACE_S,
        secrets: Mapping[str, str] | None = None,
        owner: int | None = None,
    ) -> None:
        self._command = command
        self._owner = owner
        self._secrets = secrets or {}
        self._budget = budget
        self._grace_s = grace_s
        self._stop = threading.Event()
        self._keeper: int | None = None

    def run(self) -> int:
        """Return the exit status of the last server, and 1 for one that ended with 0 without being asked to."""
        stand_in_for_closed()
        adopt_orphans()
        self._wake, wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # As under nohup.
                signal.signal(number, self._on_stop)
        restart = False
        while True:
            directory = RunDirectory.create()
            try:
                status = self._run_once(self._command(restart), directory)
                accepted, up_since = directory.state_file.exists(), directory.up_since()
            finally:
                directory.remove()
            if self._stop.is_set() or self._is_orphan() or not accepted:  # `--help`, or a wrong command line.
                return status
            pause_s = self._budget.spend(0.0 if up_since is None else time.time() - up_since)
            ended, budget = f"the server {describe_exit(status)} without being asked to", self._budget
            if pause_s is None:
                say(f"{ended}; all of it was ended")
                return status or 1
            say(
                f"{ended}; restart {budget.used} of {budget.limit} in {pause_s:g} s. It will await weights: "
                "push a checkpoint, or POST /reload, before it serves"
            )
            if self._told_to_stop(pause_s):
                return status or 1
            restart = True

    def _is_orphan(self) -> bool:
        if self._owner is None:
            return False
        closed = select.poll()
        closed.register(self._owner, 0)
        return bool(closed.poll(0))

    def _told_to_stop(self, within_s: float) -> bool:
        """Wait, and return at once and true when a signal comes or the owner dies."""
        until = time.monotonic() + within_s
        while (left := until - time.monotonic()) > 0:
            if self._stop.wait(min(left, _LOOK_S)) or self._is_orphan():
                return True
        return False

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        self._stop.set()
        if self._keeper is not None:
            os.kill(self._keeper, number)
            os.kill(self._keeper, signal.SIGCONT)  # Should it have been stopped, nobody else would end the server.

    def _run_once(self, command: Sequence[str], directory: RunDirectory) -> int:
        # The keeper reads one end; the other closes when this process dies, however it does.
        alive, held = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal between fork and the keeper's own handlers would run this process's handler in the keeper.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            os.close(held)
            keeper = Keeper(
                command,
                supervisor=alive,
                directory=directory,
                grace_s=self._grace_s,
                secrets=self._secrets,
                owner=self._owner,
            )
            _become_keeper(keeper, directory)
        self._keeper = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._stop.is_set():  # The signal came before there was a keeper to pass it on to.
            os.kill(pid, signal.SIGTERM)
        self._until_ended(pid)
        self._keeper = None
        _, wait_status = os.waitpid(pid, 0)
        os.close(alive)
        os.close(held)

        def is_ours(child: int) -> bool:
            # A shell that started helpers and then became this process leaves us children that are none of the server.
            marked = has_in_environment(child, f"{VARIABLE}={directory.path}")
            return marked or session_of(child) == pid

        # Nothing is left unless the keeper was killed; then its children are ours.
        if not end_all_children(patience_s=0.0, is_ours=is_ours):
            say("a process of the server cannot be killed; see `ps`")
        return exit_status(wait_status)

    def _until_ended(self, keeper: int) -> None:
        """Wait for the keeper, which is not reaped here: a late signal must not reach somebody else of its number."""
        events = select.poll()
        events.register(self._wake, select.POLLIN)
        if self._owner is not None:
            events.register(self._owner, 0)
        while True:
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is not None:
                if ended.si_pid == keeper:
                    return
                os.waitpid(ended.si_pid, 0)  # Somebody else's orphan, of whom we have become the parent.
            for descriptor, _ in events.poll():
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                else:
                    events.unregister(descriptor)  # It stays closed.
                    os.kill(keeper, signal.SIGCONT)  # Which sees the same, unless it was stopped.


def _become_keeper(keeper: Keeper, directory: RunDirectory) -> NoReturn:
    status = 1
    try:
        os.environ[VARIABLE] = str(directory.path)
        if len(str(directory.path)) <= _LONGEST_SOCKET_FOLDER:
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(directory.path))
        status = keeper.run()
    except BaseException as error:  # noqa: BLE001 - a fork must not run its parent's code, and has one way to speak
        say(f"cannot start: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command of a supervisor that runs ``weightpush serve ARGUMENTS`` with this Python."""
    return [sys.executable, "-m", "weightpush_server.supervisor", *arguments]


def launch(arguments: Sequence[str]) -> NoReturn:
    """Become the supervisor of ``weightpush serve ARGUMENTS``: this process is replaced, and never comes back."""
    stand_in_for_closed()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command_line(arguments))


def read_options(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Take the supervisor's own option out of a command line; return it and the words for the server.

    Raises:
        SystemExit: its value is no number from 0 on.
    """
    given, rest = _take(arguments, RESTART_OPTION)
    if not given.isdecimal():
        say(f"{RESTART_OPTION} {given}: give the number of restarts, 0 for none".replace("  ", " "))
        raise SystemExit(_USAGE)
    return int(given), rest


def read_owner(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Take `END_OPTION` out of a command line; return the pipe that it means, if it is there, and the other words.

    Raises:
        SystemExit: standard input is nothing whose other end can close.
    """
    rest = [word for word in arguments if word != END_OPTION]
    if len(rest) == len(arguments):
        return None, rest
    try:
        mode = os.fstat(_STDIN).st_mode
    except OSError:
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        say(f"{END_OPTION}: standard input is no pipe: let the program that starts the server hold one open")
        raise SystemExit(_USAGE)
    return _STDIN, rest


def _take(arguments: Sequence[str], option: str) -> tuple[str, list[str]]:
    """Return the value of the last ``option VALUE`` or ``option=VALUE`` ("0" without one), and the other words."""
    value, rest, words = "0", list[str](), iter(arguments)
    for word in words:
        if word == option:
            value = next(words, "")
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def main(arguments: Sequence[str]) -> int:
    """Supervise a server with these arguments until it ends; return its exit status."""
    restarts, rest = read_options(arguments)
    owner, rest = read_owner(rest)
    # vLLM may be told to let requests end first.
    draining, _ = _take(rest, "--shutdown-timeout")

    def command(restart: bool) -> list[str]:
        # The checkpoint on disk may be older than what was served.
        added = [AWAIT_OPTION] if restart and AWAIT_OPTION not in rest else []
        return [sys.executable, "-m", "weightpush_server", *rest, *added]

    grace_s = GRACE_S + (int(draining) if draining.isdecimal() else 0)
    secrets = {TOKEN_VARIABLE: os.environ[TOKEN_VARIABLE]} if TOKEN_VARIABLE in os.environ else {}
    forget_environment(TOKEN_VARIABLE)
    return Supervisor(command, RestartBudget(restarts), grace_s=grace_s, secrets=secrets, owner=owner).run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
