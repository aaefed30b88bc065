"""Which servers belong to a trainer at this moment, and the connections to them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from weightpush_client.access import ControlToken, Tls
from weightpush_client.fleet import Fleet
from weightpush_client.http import ServerApi
from weightpush_client.loop import LoopThread
from weightpush_client.report import PushError
from weightpush_client.urls import normalise_urls
from weightpush_protocol.errors import ErrorCode

#: Addresses of servers, or a function that returns those of the present ones.
Urls: TypeAlias = str | Iterable[str] | Callable[[], str | Iterable[str]]


class Membership:
    """Asks for the present servers whenever they are needed. Connections to those that stay are kept.

    Raises:
        WeightPushError: ``invalid_request``: an address is none, or is named twice; certificates that cannot be read.
    """

    def __init__(self, urls: Urls, *, token: ControlToken, trust_env: bool = False, verify: Tls) -> None:
        self._token = token
        self._trust_env = trust_env
        self._verify = verify
        self._ask = urls if callable(urls) else None
        self._lock = threading.Lock()
        self._connections: dict[str, ServerApi] = {}
        #: How many callers use the connection to each server.
        self._uses: Counter[str] = Counter()
        self._urls = () if callable(urls) else normalise_urls(urls)
        self._connect(self._urls)
        # Last: a thread of its own must not stay where an argument was wrong.
        self._loop = LoopThread()

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each present server, in normal form; none where there are none at the moment."""
        if self._ask is None:
            return self._urls
        asked = self._ask()
        asked = (asked,) if isinstance(asked, str) else tuple(asked)
        return normalise_urls(asked) if asked else ()

    @contextmanager
    def present(self) -> Iterator[Fleet]:
        """Lend connections to the present servers.

        Raises:
            PushError: ``unreachable``: there are none at the moment.
        """
        urls = self.urls
        if not urls:
            raise PushError(ErrorCode.UNREACHABLE, "the fleet has no servers at the moment")
        with self._lock:
            self._urls = urls
            servers = self._connect(urls)
            self._uses.update(urls)
        try:
            yield Fleet(servers, self._loop)
        finally:
            self._give_back(urls)

    def stop(self) -> None:
        """Close all connections and end the thread. May be called again."""
        if not self._loop.stopped and not self._loop.is_current_thread:
            self._loop.run(_close(tuple(self._connections.values())))
        self._loop.stop()

    def _connect(self, urls: Sequence[str]) -> tuple[ServerApi, ...]:
        for url in urls:
            if url not in self._connections:
                self._connections[url] = ServerApi(
                    url, token=self._token, trust_env=self._trust_env, verify=self._verify
                )
        return tuple(self._connections[url] for url in urls)

    def _give_back(self, urls: Sequence[str]) -> None:
        with self._lock:
            self._uses.subtract(urls)
            unused = [url for url in self._connections if url not in self._urls and not self._uses[url]]
            gone = [self._connections.pop(url) for url in unused]
        if gone and not self._loop.stopped:
            self._loop.run(_close(gone))


@contextmanager
def connected(urls: Sequence[str], token: ControlToken, verify: Tls) -> Iterator[Fleet]:
    """Lend connections to ``urls``, and close them afterwards."""
    membership = Membership(urls, token=token, verify=verify)
    try:
        with membership.present() as fleet:
            yield fleet
    finally:
        membership.stop()


async def _close(servers: Sequence[ServerApi]) -> None:
    for server in servers:
        await server.close()
