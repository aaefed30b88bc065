"""A small key-value store over TCP that only holders of a key can open; its users meet through it.

torch's ``TCPStore`` serves whoever connects, and lists its entries to them, so that no secret in an entry's name keeps
a stranger out. Here both ends show first that they know the key, without sending it::

    host                                             guest
    MAGIC, 32 random bytes             ───►
                                       ◄───          32 random bytes, HMAC-SHA256(key, "guest" + host's + guest's)
    HMAC(key, "host" + guest's + host's) ───►        from here on requests and answers: 4-byte length, JSON

Until then a connection is read for exactly those 64 bytes, has ``HANDSHAKE_S`` seconds for them, and is one of at most
``MAX_STRANGERS`` beyond the expected guests: silence, garbage and guesses end there. What follows is neither encrypted
nor signed: the network between trainer and workers must be trusted not to change what it carries.

Both ends are ``torch.distributed`` stores (a process group forms over them) and must be kept alive by their users:
torch holds them, but not the Python methods.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

# The name that torch.distributed passes on, from where it is typed.
from torch._C._distributed_c10d import Store

from weightpush_protocol.transports import sockets

HANDSHAKE_S: Final = 5.0
MAX_STRANGERS: Final = 64
#: A host answers a wait after this time at the latest; its guest looks whether it should give up, and asks again.
WAIT_SLICE_S: Final = 0.1

_MAGIC: Final = b"WPRDZV1\n"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_LENGTH: Final = struct.Struct("!I")
#: Gloo stores the addresses of all pairs of a rank in one entry.
_MAX_FRAME_BYTES: Final = 16 * 2**20
#: What an answer may take beyond the wait that it was asked for.
_ANSWER_S: Final = 10.0
_LAST_WORD_S: Final = 0.25


class StoreError(RuntimeError):
    """The store cannot be reached any more, or an entry did not come in time."""


class WrongKeyError(StoreError):
    """The other end is a store, but of another key."""


class KeyedStore(Store):
    """What host and guest share: torch's store on top of requests."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    @abstractmethod
    def _ask(self, op: str, names: Sequence[str], *, value: bytes | int = b"", within_s: float = 0.0) -> Any:
        """Do ``op`` with the entries ``names``; see ``_Entries``."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set an entry."""
        self._ask("set", [key], value=value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return an entry; wait for it where it is missing. Raises :class:`StoreError` when time is over."""
        self.wait([key])
        value: bytes | None = self._ask("get", [key])
        if value is None:
            raise StoreError(f"the entry {key} was deleted")
        return value

    def find(self, key: str, within_s: float = 0.0) -> bytes | None:
        """Return an entry, or None where it is still missing after ``within_s`` seconds, at most ``WAIT_SLICE_S``."""
        value: bytes | None = self._ask("get", [key], within_s=within_s)
        return value

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask("add", [key], value=value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all entries are there."""
        return bool(self._ask("wait", keys))

    # torch's overloads; it calls this one with and without a time.
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all entries are there. Raises :class:`StoreError` when time is over."""
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit
        while not self._ask("wait", keys, within_s=min(WAIT_SLICE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise StoreError(f"the other processes did not connect within {limit:.3g} s")

    def delete_key(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        return bool(self._ask("delete", [key]))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several entries; see :meth:`get`."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set several entries."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


class _Entries:
    """The entries themselves. Every call ends soon: a wait after ``WAIT_SLICE_S`` seconds at the latest."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def do(self, op: str, names: Sequence[str], value: bytes | int, within_s: float) -> Any:
        """Carry out one request. Raises ``ValueError`` where it makes no sense."""
        with self._changed:
            if op in ("wait", "get"):
                self._changed.wait_for(lambda: self._closed or self._all(names), min(within_s, WAIT_SLICE_S))
            if op == "wait":
                return self._all(names)
            (name,) = names
            if op == "get":
                return self._values.get(name)
            if op == "delete":
                return self._values.pop(name, None) is not None
            if op == "set" and isinstance(value, bytes):
                self._values[name] = value
            elif op == "add" and isinstance(value, int):
                value += int(self._values.get(name, b"0"))
                self._values[name] = str(value).encode()
            else:
                raise ValueError(f"no such request: {op}")
            self._changed.notify_all()
            return value if op == "add" else None

    def _all(self, names: Sequence[str]) -> bool:
        return all(name in self._values for name in names)

    def close(self) -> None:
        """End every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class HostedStore(KeyedStore):
    """The host's end. Listens on ``listener`` from construction to :meth:`close`, in threads of its own.

    All ``guests`` may connect in one moment; beside them there is room for ``MAX_STRANGERS``.
    """

    def __init__(self, listener: socket.socket, key: str, timeout_s: float, *, guests: int) -> None:
        super().__init__(timeout_s)
        self._room = MAX_STRANGERS + guests
        self._entries = _Entries()
        self._listener = listener
        self._key = _secret(key)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._answering: set[socket.socket] = set()
        # In order of arrival: when there are too many, the one that has been silent for longest has to go.
        self._strangers: dict[socket.socket, None] = {}
        self._closed = False
        self._threads = {self._start(self._accept)}

    def _start(self, work: Any, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="weightpush-rendezvous", daemon=True)
        thread.start()
        return thread

    def _ask(self, op: str, names: Sequence[str], *, value: bytes | int = b"", within_s: float = 0.0) -> Any:
        if self._closed:
            raise StoreError("the rendezvous is closed")
        return self._entries.do(op, names, value, within_s)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # Out of descriptors, or a connection that was gone before it was accepted.
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                if len(self._strangers) >= self._room:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    sockets.cut(oldest)
                self._strangers[connection] = None
                self._connections.add(connection)
            thread = self._start(self._serve, connection)
            with self._lock:
                self._threads = {known for known in self._threads if known.is_alive()} | {thread}

    def _serve(self, connection: socket.socket) -> None:
        # Whoever is on the other end gets no word of what went wrong with it.
        try:
            try:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                known = self._shake_hands(connection)
            finally:
                with self._lock:
                    self._strangers.pop(connection, None)
            while known:
                request = _receive_frame(connection, None)
                self._answering.add(connection)
                _send_frame(connection, _answer(self._entries, request))
                self._answering.discard(connection)
        except (OSError, ValueError, RecursionError):
            return
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._answering.discard(connection)
            connection.close()

    def _shake_hands(self, connection: socket.socket) -> bool:
        deadline = time.monotonic() + HANDSHAKE_S
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(_MAGIC + ours)
        theirs = _receive(connection, _NONCE_BYTES + _MAC_BYTES, deadline)
        nonce, mac = theirs[:_NONCE_BYTES], theirs[_NONCE_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, b"guest", ours, nonce)):
            return False
        connection.settimeout(None)
        connection.sendall(_mac(self._key, b"host", nonce, ours))
        return True

    def cut(self) -> None:
        """From any thread: end all connections and every pending wait."""
        self._entries.close()
        with self._lock:
            for connection in self._connections:
                sockets.cut(connection)

    def close(self) -> None:
        """Stop listening, end all connections and threads. May be called again."""
        with self._lock:
            self._closed = True
        # Closing alone would leave a pending `accept` waiting.
        sockets.cut(self._listener)
        self._listener.close()
        self._entries.close()
        # What was set last, often the reason for closing, is on its way to whoever waited for it.
        deadline = time.monotonic() + _LAST_WORD_S
        while self._answering and time.monotonic() < deadline:
            time.sleep(0.001)
        self.cut()
        for thread in list(self._threads):
            thread.join(1.0)


class GuestStore(KeyedStore):
    """A guest's end, over a connected socket, which it owns from now on.

    Raises:
        WrongKeyError: the host closed the connection after it saw our answer: its key is another one.
        StoreError: what listens there is no host, or did not answer before ``deadline`` (``time.monotonic()``).
    """

    def __init__(self, connection: socket.socket, key: str, *, deadline: float, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._connection = connection
        self._lock = threading.Lock()
        try:
            self._shake_hands(_secret(key), deadline)
        except OSError as error:
            self.close()
            raise StoreError(str(error) or type(error).__name__) from error
        except StoreError:
            self.close()
            raise

    def _shake_hands(self, key: bytes, deadline: float) -> None:
        connection = self._connection
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive(connection, len(_MAGIC) + _NONCE_BYTES, deadline, up_to=_MAGIC)
        theirs = hello[len(_MAGIC) :]
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours + _mac(key, b"guest", theirs, ours))
        try:
            mac = _receive(connection, _MAC_BYTES, deadline)
        except ConnectionError:
            raise WrongKeyError("it did not accept this update's key") from None
        if not hmac.compare_digest(mac, _mac(key, b"host", ours, theirs)):
            raise WrongKeyError("it does not know this update's key")

    def _ask(self, op: str, names: Sequence[str], *, value: bytes | int = b"", within_s: float = 0.0) -> Any:
        request: dict[str, Any] = {"op": op, "names": list(names), "within_s": within_s}
        request["value"] = base64.b64encode(value).decode() if isinstance(value, bytes) else value
        deadline = time.monotonic() + within_s + _ANSWER_S
        try:
            with self._lock:
                self._connection.settimeout(_ANSWER_S)
                _send_frame(self._connection, request)
                answer = _receive_frame(self._connection, deadline)
        except (OSError, ValueError) as error:
            # The next answer would be this request's.
            self.cut()
            raise StoreError(f"no answer: {type(error).__name__}: {error}") from error
        if answer.get("bytes") is not None:
            return base64.b64decode(answer["bytes"])
        return answer.get("result")

    def cut(self) -> None:
        """From any thread: end the connection, and a pending request with it."""
        sockets.cut(self._connection)

    def close(self) -> None:
        """End the connection. May be called again."""
        self.cut()
        self._connection.close()


def _secret(key: str) -> bytes:
    return hashlib.sha256(b"weightpush rendezvous " + key.lower().encode()).digest()


def _mac(key: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, who + first + second, "sha256")


def _answer(entries: _Entries, request: dict[str, Any]) -> dict[str, Any]:
    value = request.get("value")
    value = base64.b64decode(value) if isinstance(value, str) else value
    names, within_s = request.get("names"), request.get("within_s")
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("names must be texts")
    if not isinstance(within_s, int | float) or not isinstance(value, bytes | int):
        raise ValueError("no such request")
    result = entries.do(str(request.get("op")), names, value, float(within_s))
    return {"bytes": base64.b64encode(result).decode()} if isinstance(result, bytes) else {"result": result}


def _send_frame(connection: socket.socket, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive_frame(connection: socket.socket, deadline: float | None) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    if length > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    content = json.loads(_receive(connection, length, deadline))
    if not isinstance(content, dict):
        raise ValueError("a frame is a JSON object")
    return content


def _receive(connection: socket.socket, count: int, deadline: float | None, *, up_to: bytes = b"") -> bytes:
    """Read exactly ``count`` bytes, which must start with ``up_to`` as far as they go.

    Raises:
        OSError: the connection ended, or time is over.
        StoreError: another beginning.
    """
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
        start = min(len(data), len(up_to))
        if data[:start] != up_to[:start]:
            raise StoreError("what answers there is no rendezvous of weightpush")
    return bytes(data)
