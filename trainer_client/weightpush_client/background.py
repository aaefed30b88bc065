"""A push that runs beside the trainer: its handle, how it is stopped, and the copy of weights that change meanwhile."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from weightpush_client.report import PushError, PushReport
from weightpush_client.sources import WeightSource
from weightpush_protocol.errors import ErrorCode

_logger = logging.getLogger("weightpush")


class Stop:
    """A wish to end one push, which may come from any thread and at any time until the servers commit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._too_late = False
        self._why = ""
        self.asked = False

    def ask(self, why: str = "the push was cancelled") -> bool:
        """End the push soon; return False where that is too late. May be called again."""
        with self._lock:
            if self._too_late:
                return False
            self._why = self._why if self.asked else why
            self.asked = True
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()
        return True

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Have `ask` call ``interrupt``, at once where it was asked already."""
        with self._lock:
            self._interrupt = interrupt
            asked = self.asked
        if asked:
            interrupt()
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None

    def check(self) -> None:
        """Raise ``aborted`` where the push was asked to end."""
        if self.asked:
            raise self.error()

    def pass_by(self) -> None:
        """From here on the push cannot be ended. Raises ``aborted`` where it was asked to before."""
        with self._lock:
            self._too_late = not self.asked
        self.check()

    def error(self) -> PushError:
        """Return the error of a push that was ended."""
        return PushError(ErrorCode.ABORTED, self._why)


class PushHandle:
    """A push that runs in a thread of its own. The weights must not change until `done`, unless they were copied."""

    def __init__(self, push: Callable[[], PushReport], stop: Stop, weight_version: str) -> None:
        self._future: Future[PushReport] = Future()
        self._stop = stop
        self._version = weight_version
        self._start_on = _DeviceState()
        # No daemon: a trainer that ends in the middle of it still tells the servers.
        self._thread = threading.Thread(target=self._run, args=(push,), name="weightpush-push")
        self._thread.start()
        _handles.add(self)

    def done(self) -> bool:
        """Whether the push has ended, one way or the other."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> PushReport:
        """Wait for the end, at most ``timeout`` seconds, and return the report.

        Raises:
            TimeoutError: it still runs.
            PushError: why it failed; ``aborted`` where it was cancelled.
            BaseException: whatever the source or ``progress`` raised.
        """
        return self._future.result(timeout)

    def wait(self) -> None:
        """Wait for the end, whatever it is, and for the thread; returns at once in that thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def cancel(self) -> bool:
        """Abort the push on all servers, as if it had failed; return False if they commit already, or have.

        Returns at once: `result` raises when it has ended.
        """
        return not self.done() and self._stop.ask()

    def _run(self, push: Callable[[], PushReport]) -> None:
        try:
            self._start_on.restore()
            report = push()
        except BaseException as error:  # noqa: BLE001 - reaches the caller of result()
            # Nobody may ever ask for the result.
            _logger.warning("the push of %s in the background failed: %s", self._version, error)
            self._future.set_exception(error)
        else:
            self._future.set_result(report)


#: Handles whose push may still run.
_handles: weakref.WeakSet[PushHandle] = weakref.WeakSet()


def _wait_for_all() -> None:
    for handle in list(_handles):
        handle.wait()


# Before the executors that a push needs are shut down; `atexit` would be too late, for threads are joined before it.
threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined] # what concurrent.futures itself uses


class _DeviceState:
    """The calling thread's CUDA device, and what it has queued there: another thread would know neither."""

    def __init__(self) -> None:
        self._device: int | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own
            self._device = torch.cuda.current_device()
            self._queued = torch.cuda.current_stream().record_event()

    def restore(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.current_stream().wait_event(self._queued)


@torch.no_grad()
def copied(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return a copy of all tensors of ``source`` in host memory. Tied weights stay tied."""
    copies: dict[str, torch.Tensor] = {}
    of_identity: dict[Hashable, torch.Tensor] = {}
    names = [spec.name for spec in source.specs()]
    first = {identity: name for name in reversed(names) if (identity := source.identity(name)) is not None}
    wanted = [name for name in names if first.get(source.identity(name), name) == name]
    for name, tensor in source.tensors(wanted):
        copies[name] = tensor.detach().to("cpu", copy=True)
        if (identity := source.identity(name)) is not None:
            of_identity[identity] = copies[name]
    return {name: copies[name] if name in copies else of_identity[source.identity(name)] for name in names}
