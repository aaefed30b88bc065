"""One small memory-mapped file that all processes of a server share: control record, gate counters, worker progress.

A server has several API processes, engine cores and workers. An RPC to a worker is serial with token generation and
cannot be used to look at a worker that sits in a collective, so whatever must be visible at any time lives here:

* the *control record*: state, running update, versions. Written by any API process under a file lock.
* one *gate counter* for each API process: requests that passed the gate and have not ended. One writer each.
* *refusal counters* for each API process: requests that the gate refused, by state. One writer each.
* the *tally* of what happened since the start. Written with the control record, under its lock.
* one *progress slot* for each worker. One writer each.

Readers take no lock and never wait for a writer, not even for one that was killed in mid-write: see ``_Slot``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import BaseModel

from weightpush_protocol.state import ServerState
from weightpush_server.log import logger
from weightpush_server.observe.happenings import Happening, happenings
from weightpush_server.observe.series import CLOSED
from weightpush_server.observe.tally import Tally, counts
from weightpush_server.records import ControlRecord, WorkerRecord

_MAGIC: Final = b"WPSTATE1"
_FILE_HEADER: Final = struct.Struct("<8sII")  # magic, API processes, workers
_SEQUENCE: Final = struct.Struct("<Q")
_AREA_HEADER: Final = struct.Struct("<QII")  # sequence, length, CRC-32
_COUNTER: Final = struct.Struct("<II")  # pid, requests in flight
_REFUSALS: Final = struct.Struct(f"<{len(CLOSED)}Q")  # by state

_CONTROL_BYTES: Final = 512 * 1024
_TALLY_BYTES: Final = 64 * 1024
_WORKER_BYTES: Final = 32 * 1024
_FILE_HEADER_BYTES: Final = 64
MAX_API_PROCESSES: Final = 128

_COUNTERS_AT: Final = _FILE_HEADER_BYTES + _CONTROL_BYTES
_REFUSALS_AT: Final = _COUNTERS_AT + MAX_API_PROCESSES * _COUNTER.size
_TALLY_AT: Final = _REFUSALS_AT + MAX_API_PROCESSES * _REFUSALS.size
_WORKERS_AT: Final = _TALLY_AT + _TALLY_BYTES

_Record = TypeVar("_Record", bound=BaseModel)


def _store(memory: mmap.mmap, offset: int, data: bytes) -> None:
    # Never `pack_into`: it fills its target with zeros first, and readers in other processes would see them.
    memory[offset : offset + len(data)] = data


class _Slot(Generic[_Record]):
    """A pydantic model in a fixed stretch of the file: many readers, one writer at a time.

    Two areas take turns: a write fills the one that nobody reads and then moves the sequence number on, whose parity
    says which area counts. A writer that is killed half-way leaves the last whole record in force.
    """

    def __init__(self, memory: mmap.mmap, offset: int, size: int, model: type[_Record]) -> None:
        self._memory = memory
        self._offset = offset
        self._area = (size - _SEQUENCE.size) // 2 // 8 * 8
        self._model = model
        self._cached: tuple[int, _Record] | None = None

    @property
    def capacity(self) -> int:
        """Longest JSON that fits, in bytes."""
        return self._area - _AREA_HEADER.size

    def sequence(self) -> int:
        """Return the number of the last write; it changes with every one."""
        sequence: int = _SEQUENCE.unpack_from(self._memory, self._offset)[0]
        return sequence

    def _area_at(self, sequence: int) -> int:
        return self._offset + _SEQUENCE.size + (sequence % 2) * self._area

    def read(self) -> _Record | None:
        """Return the record, or ``None`` if the slot was never written. The result is shared: do not change it."""
        while (sequence := self.sequence()) != 0:
            if self._cached is not None and self._cached[0] == sequence:
                return self._cached[1]
            start = self._area_at(sequence)
            written, length, checksum = _AREA_HEADER.unpack_from(self._memory, start)
            start += _AREA_HEADER.size
            if written == sequence and length <= self.capacity:
                data = self._memory[start : start + length]
                if zlib.crc32(data) == checksum:
                    record = self._model.model_validate_json(data)
                    self._cached = (sequence, record)
                    return record
            time.sleep(0)  # Two writes came by meanwhile; the next look finds a later record.
        return None

    def write(self, record: _Record) -> None:
        """Replace the record.

        Raises:
            ValueError: its JSON is larger than the slot.
        """
        data = record.model_dump_json().encode()
        if len(data) > self.capacity:
            raise ValueError(f"{self._model.__name__} of {len(data)} bytes does not fit its {self.capacity} byte slot")
        sequence = self.sequence() + 1
        start = self._area_at(sequence)
        _store(self._memory, start, _AREA_HEADER.pack(sequence, len(data), zlib.crc32(data)))
        _store(self._memory, start + _AREA_HEADER.size, data)
        _store(self._memory, self._offset, _SEQUENCE.pack(sequence))


class SharedState:
    """The mapped file. ``create`` it once in the parent, ``open`` it in every child."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:  # The mapping keeps the file by itself.
            self._memory = mmap.mmap(file.fileno(), 0)
        header: tuple[bytes, int, int] = _FILE_HEADER.unpack_from(self._memory, 0)
        magic, self._api_processes, self._workers = header
        if magic != _MAGIC:
            raise ValueError(f"{path} is no weightpush state file")
        self._control = _Slot(self._memory, _FILE_HEADER_BYTES, _CONTROL_BYTES, ControlRecord)
        self._tally = _Slot(self._memory, _TALLY_AT, _TALLY_BYTES, Tally)
        self._progress = [
            _Slot(self._memory, _WORKERS_AT + rank * _WORKER_BYTES, _WORKER_BYTES, WorkerRecord)
            for rank in range(self._workers)
        ]
        #: Told of what happened in a transaction of this process, when the lock is free again. Must not raise.
        self.listener: Callable[[list[Happening]], None] | None = None

    @classmethod
    def create(cls, path: Path, *, workers: int, control: ControlRecord) -> SharedState:
        """Make the file, readable by its owner alone, with its first control record."""
        size = _WORKERS_AT + workers * _WORKER_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(size)
            file.write(_FILE_HEADER.pack(_MAGIC, MAX_API_PROCESSES, workers))
        state = cls(path)
        state._control.write(control)
        state._tally.write(Tally())
        return state

    @property
    def workers(self) -> int:
        """Number of workers that this server was started with."""
        return self._workers

    # Control record

    def sequence(self) -> int:
        """Return a number that changes whenever the control record does."""
        return self._control.sequence()

    def control(self) -> ControlRecord:
        """Return the control record as it is now. Shared: use ``transaction`` to change it."""
        record = self._control.read()
        if record is None:
            raise RuntimeError(f"{self.path} has no control record")
        return record

    @contextmanager
    def transaction(self) -> Iterator[ControlRecord]:
        """Lend a copy of the control record under the file lock and write it back, unless the block raises.

        The block must be short and must not await: every process of the server waits for the lock.
        """
        # flock belongs to the open file, so each transaction opens its own: two threads exclude each other as well.
        with self.path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.control()
            draft = before.model_copy(deep=True)
            yield draft
            self._control.write(draft)
            happened = self._count(before, draft)
        if happened and self.listener is not None:
            self.listener(happened)

    def _count(self, before: ControlRecord, after: ControlRecord) -> list[Happening]:
        """Count what a transaction did, and return it."""
        try:
            now = time.monotonic()
            happened = happenings(before, after, now)
            if any(map(counts, happened)):  # Each write costs some 70 µs under the lock.
                tally = self.tally().model_copy(deep=True)
                tally.count(happened, now)
                self._tally.write(tally)
        except Exception:  # noqa: BLE001 - what is only watched must not fail for the watching
            logger.exception("what happened could not be counted")
            return []
        return happened

    def tally(self) -> Tally:
        """Return what was counted since the start. Shared: do not change it."""
        return self._tally.read() or Tally()

    # Gate counters

    def _counter_at(self, index: int) -> int:
        return _COUNTERS_AT + index * _COUNTER.size

    def claim_counter(self) -> int:
        """Take a gate counter for this process and return its index.

        Raises:
            RuntimeError: more API processes than counters.
        """
        with self.path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for index in range(self._api_processes):
                pid, _ = _COUNTER.unpack_from(self._memory, self._counter_at(index))
                if pid == 0:
                    self.set_in_flight(index, 0)
                    return index
        raise RuntimeError(f"more than {self._api_processes} API processes")

    def set_in_flight(self, index: int, count: int) -> None:
        """Publish how many requests of this process have passed the gate and not ended."""
        _store(self._memory, self._counter_at(index), _COUNTER.pack(os.getpid(), count))

    def in_flight(self) -> int:
        """Return the requests that have passed the gate and not ended, over all API processes."""
        counters = (_COUNTER.unpack_from(self._memory, self._counter_at(i)) for i in range(self._api_processes))
        return sum(count for pid, count in counters if pid)

    def count_refusal(self, index: int, state: ServerState) -> None:
        """Count a request that this process's gate refused in ``state``; one in which the gate has just opened again
        was refused for an update."""
        where = _REFUSALS_AT + index * _REFUSALS.size
        counts = list(_REFUSALS.unpack_from(self._memory, where))
        counts[CLOSED.index(state if state in CLOSED else ServerState.UPDATING)] += 1
        _store(self._memory, where, _REFUSALS.pack(*counts))

    def refusals(self) -> dict[ServerState, int]:
        """Return the requests that the gate has refused in each state, over all API processes."""
        size = _REFUSALS.size
        rows = [_REFUSALS.unpack_from(self._memory, _REFUSALS_AT + i * size) for i in range(self._api_processes)]
        return dict(zip(CLOSED, map(sum, zip(*rows, strict=True)), strict=True))

    # Worker progress

    def write_worker(self, record: WorkerRecord) -> None:
        """Publish a worker's progress; called by that worker alone."""
        self._progress[record.rank].write(record)

    def worker(self, rank: int) -> WorkerRecord | None:
        """Return what worker ``rank`` published last, or ``None`` before its first word."""
        return self._progress[rank].read()

    def worker_records(self) -> list[WorkerRecord]:
        """Return what the workers published last, in rank order; those that said nothing yet are left out."""
        return [record for slot in self._progress if (record := slot.read()) is not None]
