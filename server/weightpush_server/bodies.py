"""Request bodies of the control routes: read within limits of size and time, into a model or into a spool file.

A client that sends its body slowly, or never ends it, holds nothing beyond the limit: neither an update nor memory.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import NAMED_OFFENDERS

#: Largest body of calls that bring no manifest, in bytes; larger ones are validated off the event loop, so that the
#: status still answers at once.
SMALL_BODY_BYTES: Final = 64 * 1024
#: Seconds within which a small body must have arrived, and one with a manifest.
SMALL_BODY_S: Final = 10.0
MANIFEST_BODY_S: Final = 60.0
_RENEW_S: Final = 0.5

_Model = TypeVar("_Model", bound=BaseModel)


async def read_json(request: Request, model: type[_Model], *, limit: int, within_s: float) -> _Model:
    """Read and validate a JSON body of at most ``limit`` bytes.

    Raises:
        WeightPushError: ``too_large``, ``slow_body``, or ``invalid_request`` with the first offending fields.
    """
    data = bytearray()
    _check_length(request, limit, "the body")
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise _too_large("the body", limit)
    except TimeoutError:
        raise slow_body(f"the body did not arrive within {within_s:g} s", len(data)) from None
    if not data and not any(field.is_required() for field in model.model_fields.values()):
        return model()  # No body stands for ``{}`` where that is enough.
    try:
        if len(data) <= SMALL_BODY_BYTES:
            return model.model_validate_json(bytes(data))
        return await asyncio.to_thread(model.model_validate_json, bytes(data))
    except ValidationError as error:
        offenders = [
            {"field": ".".join(map(str, problem["loc"])), "problem": problem["msg"]}
            for problem in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        first = "; ".join(f"{item['field'] or 'body'}: {item['problem']}" for item in offenders[:NAMED_OFFENDERS])
        raise WeightPushError(
            ErrorCode.INVALID_REQUEST,
            f"the body does not fit {model.__name__}: {first}",
            details={"problems": offenders[:NAMED_OFFENDERS], "total": len(offenders)},
        ) from None


@asynccontextmanager
async def spooled(
    request: Request, spool: Spool, *, limit: int, within_s: float, arriving: Callable[[], None]
) -> AsyncIterator[Path]:
    """Keep a request body in a file in memory for as long as the block lasts.

    ``arriving`` is called now and then while bytes come.

    Raises:
        WeightPushError: ``too_large``: over ``limit`` bytes, or no room; ``slow_body``; what ``arriving`` raises.
    """
    announced = _check_length(request, limit, "the bucket")
    with spool.file(limit if announced is None else announced) as file:
        renewed = time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                async for chunk in request.stream():
                    if time.monotonic() - renewed > _RENEW_S:
                        arriving()
                        renewed = time.monotonic()
                    if file.size + len(chunk) > limit:
                        raise _too_large("the bucket", limit)
                    file.write(chunk)
        except TimeoutError:
            raise slow_body(f"the bucket did not arrive within bucket_s = {within_s:g} s", file.size) from None
        file.end()
        yield file.path


def _check_length(request: Request, limit: int, what: str) -> int | None:
    """Return the length that a request announces, if it does, before any of it is read."""
    text = request.headers.get("content-length", "")
    if not text.isascii() or not text.isdigit():
        return None
    if len(text) > 20 or int(text) > limit:
        raise _too_large(what, limit)
    return int(text)


def _too_large(what: str, limit: int) -> WeightPushError:
    return WeightPushError(
        ErrorCode.TOO_LARGE,
        f"{what} is larger than {limit} bytes" + ("; send smaller buckets" if "bucket" in what else ""),
        details={"limit_bytes": limit},
    )


def slow_body(message: str, received: int) -> WeightPushError:
    """Return the error of a body of which only ``received`` bytes came in time; ``message`` says the limit."""
    return WeightPushError(
        ErrorCode.SLOW_BODY, f"{message}: only {received} bytes came", details={"received_bytes": received}
    )


class Spool:
    """A directory in memory for bodies on their way to the workers; all API processes together stay below ``limit``.

    From the start a file has the size that its body may have, without taking that memory yet, so that what is there
    adds up to what may come.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    @contextmanager
    def file(self, size: int) -> Iterator[SpoolFile]:
        """Lend a new file for a body of at most ``size`` bytes; it is deleted at the end.

        Raises:
            WeightPushError: ``too_large``: other bodies take the room.
        """
        path = self._directory / uuid.uuid4().hex
        with path.open("xb") as handle:
            try:
                self._reserve(handle, size)
                yield SpoolFile(path, handle)
            finally:
                path.unlink(missing_ok=True)

    def _reserve(self, handle: BinaryIO, size: int) -> None:
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            with os.scandir(self._directory) as entries:
                taken = sum(_size(entry) for entry in entries)
            if taken + size > self._limit:
                raise WeightPushError(
                    ErrorCode.TOO_LARGE,
                    f"bodies on their way may take {taken} of {self._limit} bytes already: send one bucket at a time",
                    details={"limit_bytes": self._limit, "taken_bytes": taken},
                )
            handle.truncate(size)
        finally:
            os.close(directory)


class SpoolFile:
    """One body on its way in."""

    def __init__(self, path: Path, handle: BinaryIO) -> None:
        self.path = path
        #: Bytes that have come.
        self.size = 0
        self._handle = handle

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``. Raises ``WeightPushError`` (``too_large``) where memory is full."""
        try:
            self._handle.write(chunk)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            message = f"there is no memory left for the bucket in {self.path.parent}: {error.strerror}"
            raise WeightPushError(ErrorCode.TOO_LARGE, message) from error
        self.size += len(chunk)

    def end(self) -> None:
        """Note that all has come: give back what was reserved and not needed."""
        self._handle.flush()
        self._handle.truncate(self.size)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # Its body has landed meanwhile.
        return 0


def read_query(values: Mapping[str, Any], model: type[_Model]) -> _Model:
    """Return the parameters of a query as a ``model``.

    Raises:
        WeightPushError: ``invalid_request``, naming the first that does not fit.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise WeightPushError(
            ErrorCode.INVALID_REQUEST, f"query parameter {problem['loc'][0]}: {problem['msg']}"
        ) from None
