"""The process between the supervisor and the server: it leads the server's session, and nothing below it survives it.

The supervisor may be killed without warning; this process then ends the server. It is the supervisor's fork, so
it needs the standard library only, and no thread.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final

from weightpush_server.processes import adopt_orphans, end_all_children, reap, say, wake_when_parent_dies
from weightpush_server.rundir import RunDirectory

#: Signals that mean: stop in good order.
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds that a server may take to stop in good order.
GRACE_S: Final = 60.0
#: Seconds that a server's other processes may take to end after its first one has, when that was in good order.
_PATIENCE_S: Final = 5.0


class Keeper:
    """Starts one server and ends with it. ``supervisor``: a file descriptor that closes when the supervisor dies.

    ``secrets``: variables for the server's environment alone. ``owner``: a pipe whose other end closes when the program
    that wanted the server dies; ``None`` if nobody holds one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        supervisor: int,
        directory: RunDirectory,
        grace_s: float,
        secrets: Mapping[str, str],
        owner: int | None = None,
    ) -> None:
        self._command = command
        self._owner = owner
        self._secrets = secrets
        self._supervisor = supervisor
        self._directory = directory
        self._grace_s = grace_s
        self._server: int | None = None
        self._stop_by: float | None = None
        self._interrupted = False
        #: Why the server was killed, if it was. Said when all is done: printing waits where nobody reads.
        self._killed_because: str | None = None

    def run(self) -> int:
        """Run the server until it ends; return its exit status, as a shell would show it."""
        os.setsid()  # A terminal's Ctrl-C reaches the supervisor alone, which passes it on.
        adopt_orphans()
        wake_when_parent_dies()
        self._wake, wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # The supervisor has blocked them for us.
        self._server = server = os.posix_spawn(self._command[0], list(self._command), {**os.environ, **self._secrets})
        if self._stop_by is not None:  # The signal came before there was a server to pass it on to.
            os.kill(server, signal.SIGTERM)
        status = self._until_ended(server)
        stopping = self._stop_by is not None
        end_all_children(patience_s=_PATIENCE_S if stopping and status < 128 else 0.0)
        if self._is_alone():
            self._directory.remove()  # Else the supervisor does.
        if self._killed_because is not None:
            say(self._killed_because)
        return status

    def _is_alone(self) -> bool:
        """Whether the supervisor is gone, or whoever wanted the server: the other end of a pipe is closed."""
        ends = select.poll()
        for descriptor in (self._supervisor, self._owner):
            if descriptor is not None:
                ends.register(descriptor, 0)
        return bool(ends.poll(0))

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        # Whoever presses Ctrl-C twice does not want to wait.
        impatient = self._interrupted and number == signal.SIGINT
        self._interrupted = self._interrupted or number == signal.SIGINT
        if impatient or self._stop_by is None:
            self._stop_by = time.monotonic() + (0.0 if impatient else self._grace_s)
        if self._server is not None:
            # vLLM does not know SIGHUP, which would kill it.
            os.kill(self._server, signal.SIGTERM if number == signal.SIGHUP else number)

    def _until_ended(self, server: int) -> int:
        events = select.poll()
        events.register(self._wake, select.POLLIN)
        events.register(self._supervisor, 0)  # Zero: only that the other end is closed.
        if self._owner is not None:
            events.register(self._owner, 0)
        while True:
            if (status := self._collect(server)) is not None:
                return status
            left = None if self._stop_by is None else max(0.0, self._stop_by - time.monotonic())
            if left == 0.0:
                return self._kill(server, f"the server did not stop within {self._grace_s:g} s and was killed")
            ready = {descriptor for descriptor, _ in events.poll(None if left is None else 1000 * left)}
            if self._supervisor in ready:
                return self._kill(server, "the supervisor was killed; the server was ended")
            if self._owner in ready:
                return self._kill(server, "standard input was closed; the server was ended")
            if self._wake in ready:
                os.read(self._wake, 4096)

    def _collect(self, server: int) -> int | None:
        """Reap what has ended; return the server's status if it is among that."""
        status = reap().get(server)
        if status is not None:
            self._server = None  # Its number may belong to somebody else from now on.
        return status

    def _kill(self, server: int, because: str) -> int:
        self._killed_because = because
        os.kill(server, signal.SIGKILL)
        while (status := self._collect(server)) is None:
            time.sleep(0.01)
        return status
