"""Bodies of the model's clients on their way in: held back before they are counted, within limits of memory and time.

Neither limit can be left to vLLM: its own check of credentials, and its reading of the body, come after the gate.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Message, Receive

from weightpush_server.bodies import slow_body

#: Bytes that are held back of one body, and of all bodies in one API process. What is larger, or finds no room, counts
#: as running from then on; nothing is refused for its size.
HELD_BYTES: Final = 16 * 1024 * 1024
ROOM_BYTES: Final = 256 * 1024 * 1024
#: Seconds that a body may keep the server waiting, and the rate of bytes that earns it a second more.
BODY_S: Final = 60.0
SLOWEST_BYTES_PER_S: Final = 64 * 1024


class Room:
    """The bytes that one API process holds back."""

    def __init__(self) -> None:
        self.taken = 0


class HeldBody:
    """One request's body. It is held back first, and what was held is the beginning of what is handed on."""

    def __init__(self, receive: Receive, room: Room) -> None:
        self._receive = receive
        self._room = room
        # Not a list of messages: one for every byte of a trickle would take hundreds of times its size.
        self._held = bytearray()
        self._holding = True
        self._more = True
        self._received = 0
        self._left_s = BODY_S

    async def hold(self) -> bool:
        """Read the body until it is whole or there is no room for more; return whether its client is still there.

        Raises:
            WeightPushError: ``slow_body``.
        """
        while self._more:
            message = await self._next()
            if message["type"] != "http.request":
                return False
            body = message.get("body", b"")
            self._held += body
            self._room.taken += len(body)
            if len(self._held) > HELD_BYTES or self._room.taken > ROOM_BYTES:
                break
        return True

    async def receive(self) -> Message:
        """Return the request's next message, as an ASGI application expects it.

        Raises:
            WeightPushError: ``slow_body``: the rest of a body that was not held does not come.
        """
        if self._holding:
            body = bytes(self._held)
            self.release()
            return {"type": "http.request", "body": body, "more_body": self._more}
        return await (self._next() if self._more else self._receive())

    def release(self) -> None:
        """Give back what is held; for the end of the request, too."""
        self._holding = False
        self._room.taken -= len(self._held)
        self._held = bytearray()

    async def _next(self) -> Message:
        clock = asyncio.get_running_loop().time
        asked = clock()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            limit = f"{BODY_S:g} s, and one more for every {SLOWEST_BYTES_PER_S} bytes"
            raise slow_body(f"the body did not arrive in time ({limit})", self._received) from None
        size = len(message.get("body", b""))
        self._received += size
        # Only what the client kept us waiting: the application may take its time.
        self._left_s += size / SLOWEST_BYTES_PER_S - (clock() - asked)
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        return message
