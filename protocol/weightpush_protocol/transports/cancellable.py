"""Run blocking calls that know no cancellation so that their caller can leave them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

_POLL_S: Final = 0.02
#: How long a cancelled thread may take to notice before its connections are cut.
_GRACE_S: Final = 0.3


class Cancelled(Exception):
    """The rendezvous was aborted, or the caller's time was over."""


def run_cancellable(
    work: Callable[[], T],
    *,
    cancel: threading.Event,
    deadline: float,
    cut: Callable[[], None],
    discard: Callable[[T], None],
    name: str,
) -> T:
    """Return ``work()``, run in a thread that is left behind when it does not end.

    ``work`` looks at ``cancel`` between its blocking calls; one that hangs in a call is freed with ``cut``. A result
    that comes too late goes to ``discard``.

    Raises:
        Cancelled: ``cancel`` was set or ``deadline`` (``time.monotonic()``) passed before ``work`` ended.
        BaseException: what ``work`` raised.
    """
    lock = threading.Lock()
    ended = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []
    left = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            with lock:
                if not left:
                    errors.append(error)
        else:
            with lock:
                if left:
                    discard(result)
                else:
                    results.append(result)
        ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while not ended.wait(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
        if cancel.is_set() or time.monotonic() >= deadline:
            cancel.set()
            if not ended.wait(_GRACE_S):
                cut()
                ended.wait(_GRACE_S)
            break
    with lock:
        left = not (results or errors)
    if left:
        raise Cancelled("aborted")
    thread.join()
    if errors:
        error = errors.pop()
        try:
            raise error
        finally:
            # The traceback refers to this frame; a cycle would keep sockets open until the next collection.
            del error
    return results[0]
