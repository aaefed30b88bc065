"""One call of a pusher at a time, and what becomes of it when the pusher is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightpush_client.background import Stop
from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode


class Turns:
    """Taken for each call that changes servers; given back by whoever carried it out, in any thread."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        #: Guards what follows.
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._stop: Stop | None = None
        self._at_end: Callable[[], None] | None = None

    def take(self) -> None:
        """Raise ``update_in_progress`` if another call has not ended."""
        if not self._busy.acquire(blocking=False):
            raise PushError(
                ErrorCode.UPDATE_IN_PROGRESS,
                "this pusher is in the middle of another push: wait for it, or use one pusher a thread",
            )

    @contextmanager
    def carry_out(self, stop: Stop | None = None) -> Iterator[None]:
        """Carry out, in this thread, what the turn was taken for; ``stop`` ends it when the pusher is closed."""
        with self._lock:
            self._thread, self._stop = threading.get_ident(), stop
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Let the next call begin."""
        with self._lock:
            at_end, self._at_end = self._at_end, None
            self._thread = self._stop = None
        self._busy.release()
        if at_end is not None:
            at_end()

    @contextmanager
    def one(self, stop: Stop | None = None) -> Iterator[None]:
        """Take a turn and carry it out."""
        self.take()
        with self.carry_out(stop):
            yield

    def close(self, free: Callable[[], None]) -> None:
        """End a call that can be stopped, wait for any other, then call ``free``.

        From the thread that carries a call out (in its ``progress``, in a signal's handler) this returns at once, and
        ``free`` is called at the end of that call: nobody can wait for himself.
        """
        with self._lock:
            mine = self._thread == threading.get_ident()
            stop = self._stop
            if mine:
                self._at_end = free
        if stop is not None:
            stop.ask("the push was ended: its pusher was closed")
        if not mine:
            with self._busy:
                free()
