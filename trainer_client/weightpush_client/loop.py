"""An event loop in a thread of its own, so that a synchronous caller can end a pending HTTP call at any moment.

Works in a trainer that runs a loop itself (a Ray actor, a notebook), since it never touches the caller's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallScope:
    """Calls that can be cancelled together: those that run now, and those that would start later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._cancelled = False

    def add(self, future: Future[Any]) -> None:
        """Take ``future`` in; cancel it if the scope is cancelled already."""
        with self._lock:
            self._futures.add(future)
            cancelled = self._cancelled
        if cancelled:
            future.cancel()

    def discard(self, future: Future[Any]) -> None:
        """Forget ``future``, which has ended."""
        with self._lock:
            self._futures.discard(future)

    def cancel(self) -> None:
        """Cancel every call; those who wait for one get ``CancelledError``. May be called again, from any thread."""
        with self._lock:
            self._cancelled = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()


class LoopThread:
    """Runs coroutines for synchronous callers. A daemon thread: it never keeps a process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="weightpush-http", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether nothing can run here any more: `stop` was called, or the process forked."""
        return self._loop.is_closed() or self._pid != os.getpid()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs inside the loop, as a finalizer can: it must not wait for the loop there."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T], scope: CallScope | None = None) -> T:
        """Run ``coroutine`` to its end and return its result; an exception here (Ctrl-C) cancels it.

        Raises:
            RuntimeError: the loop was stopped, or this process was forked after it started.
            concurrent.futures.CancelledError: ``scope`` was cancelled, or the loop stopped meanwhile.
        """
        scope = scope or CallScope()
        future = self.start(coroutine)
        try:
            scope.add(future)
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            scope.discard(future)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``coroutine`` beside the caller; cancelling the future cancels it.

        Raises:
            RuntimeError: as `run`.
        """
        if self.stopped:
            coroutine.close()
            raise RuntimeError("this pusher is closed, or was made before a fork: make a new one in this process")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel what runs, end the thread and close the loop. May be called again."""
        if self.stopped:
            return
        if self.is_current_thread:
            self._loop.stop()
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
