"""Servers that are asked together: every call goes to all of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from weightpush_client.http import ServerApi
from weightpush_client.loop import CallScope, LoopThread
from weightpush_protocol.status import Status

T = TypeVar("T")
Call = Callable[[int, ServerApi], Awaitable[T]]


class Fleet:
    """Some servers, whose connections are somebody else's. Synchronous, and safe to use from several threads.

    A call is given as a function of ``(index, server)``; results come in the order of the servers.
    """

    def __init__(self, servers: Sequence[ServerApi], loop: LoopThread) -> None:
        self.servers = tuple(servers)
        self._loop = loop

    def __len__(self) -> int:
        return len(self.servers)

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each server."""
        return tuple(server.url for server in self.servers)

    def only(self, indices: Sequence[int]) -> Fleet:
        """Return the servers at ``indices`` alone, in that order."""
        return Fleet([self.servers[index] for index in indices], self._loop)

    def call(self, call: Call[T], scope: CallScope | None = None) -> list[T]:
        """Ask all servers; the first failure cancels the calls that still run, and is raised."""
        return self._loop.run(self._until_failure(call), scope)

    def call_to_the_end(self, call: Call[T], scope: CallScope | None = None) -> list[T | Exception]:
        """Ask all servers and wait for every one; a failure takes the place of its result."""
        return self._loop.run(self._all(call), scope)

    def statuses(self, within_s: float | None = None, scope: CallScope | None = None) -> list[Status | Exception]:
        """Look at all servers, at most ``within_s`` seconds where given; a failure takes the place of its status."""
        return self.call_to_the_end(lambda _, server: server.status(within_s), scope)

    def beside(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Run ``coroutine`` beside the caller where the calls run; cancelling the future cancels it."""
        return self._loop.start(coroutine)

    async def _until_failure(self, call: Call[T]) -> list[T]:
        tasks = [asyncio.ensure_future(call(index, server)) for index, server in enumerate(self.servers)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _all(self, call: Call[T]) -> list[T | Exception]:
        async def one(index: int, server: ServerApi) -> T | Exception:
            try:
                return await call(index, server)
            except Exception as error:  # noqa: BLE001 - becomes this server's result
                return error

        return list(await asyncio.gather(*(one(index, server) for index, server in enumerate(self.servers))))
