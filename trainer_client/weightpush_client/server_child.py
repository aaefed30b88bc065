"""One ``weightpush serve`` as a child of this process, which it does not outlive however this process ends."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

#: Lines of the log that are kept, and characters of each.
_KEPT: Final = 200
_WIDTH: Final = 2000
#: Seconds that the rest of a server may take to end when its first process has, or its pipe was closed.
_GONE_S: Final = 60.0


class ServerChild:
    """Started at once; one thread must call `wait`.

    The child's standard input is a pipe that nobody writes to: it closes when this process dies, and with
    ``--end-with-stdin`` the server ends then. Its output is read to the end, which comes when the last process that
    could write to it is gone: that, and not the end of the child alone, is the end of a server.

    Args:
        command: words of the command.
        environment: the whole environment of the child.
        echo: called with each line of its output, from a thread of its own.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], echo: Callable[[str], None] = lambda _: None
    ) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._gone = threading.Event()
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the driver's terminal is the driver's.
        )
        self._reader = threading.Thread(target=self._read, args=(echo,), name="server-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the server's supervisor."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the supervisor runs."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until all of the server is gone; return its exit status, negative for the signal that killed it."""
        status = self._process.wait()
        self._reader.join(_GONE_S)
        self._hang_up()
        self._gone.set()
        return status

    def kill(self) -> None:
        """End the server as if its supervisor had been killed; return when all of it is gone."""
        self._process.kill()
        self._gone.wait(_GONE_S)

    def stop(self, grace_s: float) -> bool:
        """End the server in good order, after ``grace_s`` seconds by force; return whether all of it is gone."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # Should it have been stopped.
        if not self._gone.wait(grace_s):
            self._hang_up()
            self._process.kill()
        return self._gone.wait(_GONE_S) and not self._reader.is_alive()

    def tail(self, lines: int = 60) -> str:
        """Return the end of what it printed."""
        return "\n".join(list(self._lines)[-lines:])

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _read(self, echo: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()[:_WIDTH]
                self._lines.append(text)
                with suppress(OSError, ValueError):  # Nobody reads our own output any more.
                    echo(text)
