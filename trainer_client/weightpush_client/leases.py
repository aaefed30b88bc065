"""Keeps the leases of an update while its trainer waits for servers, and for nothing else.

A lease is there to notice a trainer that is gone, or stuck: in its source (a dead peer of its own process group), in a
callback, stopped. So it is renewed from outside the pushing thread only while that waits for servers, which has
deadlines of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from weightpush_client.http import ServerApi
from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.messages import KeepRequest

#: How often a lease is renewed, in parts of it; and after which part of it a trainer has been silent by its own fault.
_RENEWALS: Final = 4
_SILENT_PARTS: Final = 2
#: How often is looked whether the trainer waits, in parts of a lease.
_LOOKS: Final = 16
_SHORTEST_S: Final = 0.005
#: Answers after which another call may still find the lease.
_PASSING: Final = frozenset({ErrorCode.UNREACHABLE, ErrorCode.TOO_MANY_CALLS, ErrorCode.INTERNAL, ErrorCode.SLOW_BODY})


class Leases:
    """The leases of one update, ``lease_s`` seconds each. `run` must run in the loop of the servers' connections."""

    def __init__(self, update_id: str, lease_s: float) -> None:
        self._update_id = update_id
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._waiting = 0
        #: Whether it has waited since `run` looked last: a push of many short waits is alive as well.
        self._waited = False
        self._seen = time.monotonic()
        self._longest_silence_s = 0.0
        #: Belongs to the loop: the servers that hold the update, with its epoch there, and who is being asked.
        self._held: dict[ServerApi, int] = {}
        self._asked: set[ServerApi] = set()

    def hold(self, server: ServerApi, epoch: int) -> None:
        """From now on keep the lease of ``server``; call it in the loop."""
        self._held[server] = epoch

    @property
    def trainer_was_silent(self) -> bool:
        """Whether the trainer itself paused for so long that a lease which was lost may have been lost by that."""
        with self._lock:
            self._note()
            return self._longest_silence_s > self._lease_s / _SILENT_PARTS

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the leases meanwhile. May be entered by several threads."""
        with self._lock:
            self._note()
            self._waiting += 1
            self._waited = True
        try:
            yield
        finally:
            with self._lock:
                self._note()
                self._waiting -= 1

    async def run(self) -> None:
        """Renew leases until cancelled."""
        async with asyncio.TaskGroup() as calls:
            renewed = time.monotonic()
            while True:
                await asyncio.sleep(max(_SHORTEST_S, self._lease_s / _LOOKS))
                with self._lock:
                    if not (self._waiting or self._waited):
                        continue
                    self._waited = False
                    if self._waiting:
                        self._note()
                if time.monotonic() - renewed < self._lease_s / _RENEWALS:
                    continue
                renewed = time.monotonic()
                # One that does not answer must not cost the others their leases.
                for server in self._held.keys() - self._asked:
                    calls.create_task(self._renew(server))

    def _note(self) -> None:
        """Note that the trainer is alive and about its servers; call it with the lock."""
        now = time.monotonic()
        self._longest_silence_s = max(self._longest_silence_s, now - self._seen)
        self._seen = now

    async def _renew(self, server: ServerApi) -> None:
        self._asked.add(server)
        try:
            await server.keep(KeepRequest(update_id=self._update_id, epoch=self._held[server]), self._lease_s)
        except PushError as error:
            # Whatever it is, the next call of the update itself says it.
            if error.code not in _PASSING:
                self._held.pop(server, None)
        finally:
            self._asked.discard(server)
