"""A TCP proxy between trainer and server that can hold back, cut, and lose what passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

_CHUNK = 64 * 1024


class Proxy:
    """Listens on a loopback port of its own and forwards to ``127.0.0.1:upstream``. Runs in a thread of its own."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.port = 0
        #: What was done to whom since the last ``heal``.
        self.struck = 0
        self._delay_s = 0.0
        self._refusing = False
        self._drop: bytes | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    @property
    def url(self) -> str:
        """Where a trainer finds it."""
        return f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Forward faithfully again."""
        self._refusing, self._delay_s, self._drop, self.struck = False, 0.0, None, 0

    def cut(self, *, refuse: bool) -> None:
        """Reset every connection; with ``refuse`` new ones too, until ``heal``."""
        self._refusing = refuse

        async def reset() -> None:
            self._reset_all()

        asyncio.run_coroutine_threadsafe(reset(), self._loop).result()

    def delay(self, seconds: float) -> None:
        """Hold every chunk of bytes back for ``seconds``, in both directions, until ``heal``."""
        self._delay_s = seconds
        self.struck += 1

    def drop_response(self, path: str) -> None:
        """Let the next request for ``path`` reach the server, but break the connection where its answer begins."""
        self._drop = f" {path}".encode()

    def loses_answer_to(self, request_line: bytes) -> bool:
        """Whether this request is the one whose answer gets lost."""
        lost = self._drop is not None and self._drop in request_line
        if lost:
            self._drop = None
        return lost

    def close(self) -> None:
        """End the proxy and all its connections."""

        async def end() -> None:
            self._reset_all()
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            self.struck += 1
            writer.transport.abort()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(self, writer, far_writer)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(pair.pump(reader, far_writer, pair.sent), pair.pump(far_reader, writer, pair.came))
        finally:
            self._writers -= {writer, far_writer}
            writer.close()
            far_writer.close()


class _Pair:
    """The two directions of one connection."""

    def __init__(self, proxy: Proxy, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._near = near
        self._far = far
        self._doomed = False

    def sent(self, data: bytes) -> bool:
        """Look at bytes to the server; its requests begin at the start of a chunk."""
        self._doomed = self._doomed or self._proxy.loses_answer_to(data[:200].partition(b"\r\n")[0])
        return True

    def came(self, _: bytes) -> bool:
        """Look at bytes from the server; whether they may pass."""
        if self._doomed:
            self._proxy.struck += 1
            self._near.transport.abort()
            self._far.transport.abort()
        return not self._doomed

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: Callable[[bytes], bool]
    ) -> None:
        """Carry bytes one way until either end closes."""
        try:
            while data := await reader.read(_CHUNK):
                if not may_pass(data):
                    return
                if self._proxy._delay_s:
                    await asyncio.sleep(self._proxy._delay_s)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            # A reset ends both directions: the other end would wait for ever.
            self._near.transport.abort()
            self._far.transport.abort()
