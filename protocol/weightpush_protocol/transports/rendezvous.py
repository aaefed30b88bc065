"""How the processes of a collective transport find each other: bounded, cancellable, and open to key holders only.

::

    sender                                         receivers
    hosts the store
                                                   connect, show that they know the key
                                                   claim their rank, set ``joined/<rank>`` to their address
    polls until all ranks joined
    sets ``verdict`` to "go"        ───►           wait for the verdict
                 then, and only then, all build the process group
                                                   set ``formed/<rank>``
    polls for all, sets ``formed``  ───►           wait for ``formed``; all are open
    gives up: ``verdict`` says why  ───►           fail at once with the sender's reason
                                    ◄───           give up: set ``left``

The constructors of process groups block and cannot be cancelled, so nobody enters one before all have joined. Entries
lie in a store of this transport alone, which only holders of the update's key can open (:mod:`.keyed_store`).
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Final

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports import sockets
from weightpush_protocol.transports.cancellable import Cancelled
from weightpush_protocol.transports.keyed_store import (
    WAIT_SLICE_S,
    GuestStore,
    HostedStore,
    KeyedStore,
    WrongKeyError,
)

_POLL_S: Final = 0.02
_CONNECT_S: Final = 5.0
_VERDICT: Final = "verdict"
_GO: Final = "go"


def ranks_text(ranks: list[int]) -> str:
    """Name worker ranks for a message, at most ten of them."""
    shown = ", ".join(str(rank) for rank in ranks[:10])
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"worker rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def failed(message: str, error: BaseException | None = None, **details: object) -> WeightPushError:
    """Return the error of a rendezvous; ``error`` is what was caught."""
    if error is not None:
        details["exception"] = type(error).__name__
    return WeightPushError(ErrorCode.RENDEZVOUS_FAILED, message, details=details)


def _text(store: KeyedStore, name: str, within_s: float = 0.0) -> str | None:
    """Return an entry as text, or None where it is missing."""
    value = store.find(name, within_s)
    return None if value is None else value.decode("utf-8", "replace")


class RendezvousServer:
    """The sender's side; hosts the store from construction to :meth:`close`.

    Raises:
        WeightPushError: ``rendezvous_failed``: ``host`` is not an address of this machine.
    """

    def __init__(self, host: str, key: str, world_size: int) -> None:
        self.host = host
        self.world_size = world_size
        try:
            listener = sockets.listen(host)
        except OSError as error:
            raise failed(
                f"cannot listen on {host!r} for workers: {error}; give an address of this machine", error, host=host
            ) from error
        self.port = int(listener.getsockname()[1])
        self._store: HostedStore | None = HostedStore(listener, key, _CONNECT_S, guests=world_size - 1)

    def gather(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[KeyedStore, str]:
        """Wait for all workers, let them go, and return the group's store and the sender's address for them.

        Raises:
            WeightPushError: ``rendezvous_failed``, naming who is missing or gave up.
            Cancelled: ``cancel`` was set.
        """
        store = self._require()
        ranks = list(range(1, self.world_size))
        try:
            while not store.check([f"joined/{rank}" for rank in ranks]):
                self._check_left(store)
                if time.monotonic() >= deadline:
                    raise self._missing(store, timeout_s)
                if cancel.wait(_POLL_S):
                    raise Cancelled("aborted")
        except (Cancelled, WeightPushError) as error:
            store.set(_VERDICT, error.message if isinstance(error, WeightPushError) else "the trainer aborted")
            raise
        # A name may resolve differently here; workers have said from where they come.
        address = (
            self.host if sockets.is_address(self.host) else sockets.pick_host(_text(store, "joined/1") or self.host)
        )
        store.set(_VERDICT, _GO)
        return store, address

    def confirm_formed(
        self, store: KeyedStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        """Wait until all workers report that they formed the group, and let them know.

        ``ends`` are the local ends of this process's connections; returns the rank behind each end of anybody.

        Raises:
            WeightPushError: ``rendezvous_failed``, naming who did not report.
            Cancelled: ``cancel`` was set.
        """
        names = [f"formed/{rank}" for rank in range(1, self.world_size)]
        while not store.check(names):
            if time.monotonic() >= deadline:
                absent = [rank for rank, name in enumerate(names, 1) if not store.check([name])]
                raise failed(f"{ranks_text(absent)} joined, but did not form the group in time", missing_ranks=absent)
            if cancel.wait(_POLL_S / 4):
                raise Cancelled("aborted")
        ranks = dict.fromkeys(ends, 0)
        for rank, name in enumerate(names, 1):
            ranks.update(dict.fromkeys(bytes(store.get(name)).decode().split(), rank))
        store.set("formed", " ".join(f"{end}={rank}" for end, rank in ranks.items()))
        return ranks

    def _missing(self, store: KeyedStore, timeout_s: float) -> WeightPushError:
        absent = self._absent(store)
        return failed(
            f"{ranks_text(absent)} did not join within {timeout_s:g} s at {_at(self.host, self.port)}; "
            "check that the workers can reach this address",
            missing_ranks=absent,
            host=self.host,
            port=self.port,
        )

    def _check_left(self, store: KeyedStore) -> None:
        reason = _text(store, "left")
        if reason is None:
            return
        absent = self._absent(store)
        if absent:
            reason = f"{ranks_text(absent)} did not join: {reason}"
        raise failed(reason, missing_ranks=absent, host=self.host, port=self.port)

    def _absent(self, store: KeyedStore) -> list[int]:
        return [rank for rank in range(1, self.world_size) if not store.check([f"joined/{rank}"])]

    def _require(self) -> KeyedStore:
        if self._store is None:
            raise RuntimeError("this rendezvous is closed")
        return self._store

    def cut(self) -> None:
        """From any thread: end the connections of the store."""
        store = self._store
        if store is not None:
            store.cut()

    def close(self) -> None:
        """Stop hosting the store."""
        if self._store is not None:
            self._store.close()
        self._store = None


class RendezvousClient:
    """A receiver's side: joins the rendezvous at ``host:port`` as ``rank``."""

    def __init__(self, host: str, port: int, key: str, rank: int) -> None:
        self.host = host
        self.port = port
        self.rank = rank
        self._key = key
        self._store: GuestStore | None = None

    @property
    def at(self) -> str:
        """Where the rendezvous is, for messages."""
        return _at(self.host, self.port)

    def join(self, cancel: threading.Event, deadline: float, timeout_s: float) -> tuple[KeyedStore, str]:
        """Join, wait until all have, and return the group's store and this worker's address for the others.

        Raises:
            WeightPushError: ``rendezvous_failed``: unreachable, wrong key, rank taken, or the sender gave up.
            Cancelled: ``cancel`` was set.
        """
        connected_by = min(deadline, time.monotonic() + _CONNECT_S)
        try:
            connection = sockets.connect(self.host, self.port, connected_by, cancel.is_set)
        except InterruptedError:
            raise Cancelled("aborted") from None
        except OSError as error:
            raise self._unreachable(error) from error
        address = str(connection.getsockname()[0])
        try:
            # The host has the first word, and may be slow.
            self._store = GuestStore(connection, self._key, deadline=connected_by, timeout_s=_CONNECT_S)
            return self._join(self._store, address, cancel, deadline, timeout_s), address
        except WrongKeyError as error:
            raise failed(
                f"the rendezvous at {self.at} does not know this update's key; "
                "is another trainer listening there, or is the update an old one?",
                error,
                host=self.host,
                port=self.port,
            ) from error
        except RuntimeError as error:
            raise self._lost(error, cancel) from error

    def _join(
        self, store: KeyedStore, address: str, cancel: threading.Event, deadline: float, timeout_s: float
    ) -> KeyedStore:
        if store.add(f"claim/{self.rank}", 1) > 1:
            raise failed(
                f"worker rank {self.rank} joined twice at {self.at}; check rank_offset of the servers", rank=self.rank
            )
        store.set(f"joined/{self.rank}", address)
        while (verdict := _text(store, _VERDICT, WAIT_SLICE_S)) != _GO:
            if verdict is not None:
                raise failed(verdict)
            if cancel.is_set():
                with suppress(RuntimeError):
                    store.set("left", f"worker rank {self.rank} gave up waiting at {self.at}")
                raise Cancelled("aborted")
            if time.monotonic() >= deadline:
                store.set("left", f"worker rank {self.rank} gave up after {timeout_s:g} s at {self.at}")
                raise failed(
                    f"worker rank {self.rank} waited {timeout_s:g} s at {self.at}, but the others did not all join",
                    host=self.host,
                    port=self.port,
                )
        return store

    def confirm_formed(
        self, store: KeyedStore, ends: list[str], cancel: threading.Event, deadline: float
    ) -> dict[str, int]:
        """Report that this worker formed the group, and wait until all have; see :class:`RendezvousServer`."""
        try:
            store.set(f"formed/{self.rank}", " ".join(ends))
            while (formed := _text(store, "formed", WAIT_SLICE_S)) is None:
                if time.monotonic() >= deadline:
                    raise failed(f"worker rank {self.rank} formed the group, but not all others did in time")
                if cancel.is_set():
                    raise Cancelled("aborted")
            pairs = formed.split()
        except RuntimeError as error:
            raise self._lost(error, cancel) from error
        return {end: int(rank) for end, _, rank in (pair.rpartition("=") for pair in pairs)}

    def _lost(self, error: RuntimeError, cancel: threading.Event) -> Exception:
        """Return what a broken store means. All errors of a store are RuntimeErrors (``DistError``)."""
        if cancel.is_set():
            return Cancelled("aborted")
        return failed(
            f"worker rank {self.rank} got no answer from the trainer's rendezvous at {self.at}; "
            "did the trainer stop, or does something else listen there?",
            error,
            host=self.host,
            port=self.port,
        )

    def _unreachable(self, error: OSError) -> WeightPushError:
        reason = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        if isinstance(error, socket.gaierror):
            reason = f"the name does not resolve ({reason})"
        return failed(
            f"worker rank {self.rank} cannot reach data port {self.at}: {reason}; "
            "check the address that the trainer gave, and firewalls between trainer and workers",
            error,
            host=self.host,
            port=self.port,
        )

    def cut(self) -> None:
        """From any thread: end the connection to the store."""
        store = self._store
        if store is not None:
            store.cut()

    def close(self) -> None:
        """Leave the store."""
        if self._store is not None:
            self._store.close()
        self._store = None


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
