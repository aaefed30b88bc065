"""Turns whatever the pusher's own code raises into the one error that its callers catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

from pydantic import ValidationError

from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode, WeightPushError

_Choice = TypeVar("_Choice", bound=StrEnum)


def choice(kind: type[_Choice], argument: str, value: str) -> _Choice:
    """Return the member of ``kind`` that ``value`` is or names.

    Raises:
        ValueError: there is none; it names the argument and lists all.
    """
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{argument} {value!r} is none of {', '.join(kind)}") from None


@contextmanager
def as_push_error() -> Iterator[None]:
    """Raise a `WeightPushError` of any kind as `PushError`."""
    try:
        yield
    except WeightPushError as error:
        if isinstance(error, PushError):
            raise
        raise PushError.of(error) from error


@contextmanager
def arguments_checked() -> Iterator[None]:
    """Raise what is wrong with an argument as ``invalid_request``, which names it."""
    try:
        yield
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise PushError(ErrorCode.INVALID_REQUEST, reasons) from error
    except (ValueError, OSError) as error:
        raise PushError(ErrorCode.INVALID_REQUEST, str(error)) from error
