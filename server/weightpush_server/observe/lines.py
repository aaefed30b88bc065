"""One line in the log for each phase of an update, in logfmt, with the update's id."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, Final

from weightpush_server.log import logger
from weightpush_server.observe.happenings import Happening, Outcome, PhaseEnded, UpdateBegan, UpdateEnded
from weightpush_server.records import UpdateRecord

_BARE: Final = re.compile(r'[^\s"=\\\x00-\x1f\x7f-\U0010ffff]+')


def logfmt(fields: dict[str, Any]) -> str:
    """Return ``key=value`` pairs on one line of printable ASCII; a value with anything else in it is a JSON string.

    What is ``None`` is left out. Texts of trainers and models are among the values: none can begin a line of its own.
    """
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def line(happening: Happening) -> tuple[int, dict[str, Any]] | None:
    """Return level and fields of the line for a happening; ``None`` for one without a line."""
    if isinstance(happening, UpdateBegan):
        return logging.INFO, {**_who("update_began", happening.update), **_what(happening.update)}
    if isinstance(happening, PhaseEnded):
        fields = _who("update_phase", happening.update)
        return logging.INFO, {**fields, "phase": happening.phase.value, "seconds": happening.seconds}
    if isinstance(happening, UpdateEnded):
        return _end(happening)
    return None


def _who(event: str, update: UpdateRecord) -> dict[str, Any]:
    return {
        "event": f"weightpush.{event}",
        "update_id": update.update_id,
        "epoch": update.epoch,
        "weight_version": update.weight_version,
    }


def _what(update: UpdateRecord) -> dict[str, Any]:
    return {
        "mode": update.mode.value,
        "transport": update.transport,
        "in_flight": update.in_flight.value,
        "tensors": update.tensors_total or None,
        "bytes": update.bytes_total or None,
        "undoes": update.undoes,
    }


def _end(end: UpdateEnded) -> tuple[int, dict[str, Any]]:
    took = {"seconds": end.seconds, "pause_seconds": end.pause_seconds, "state": end.state.value}
    if end.outcome is Outcome.COMMITTED:
        fields = {**_who("update_committed", end.update), **_what(end.update), **took}
        return logging.INFO, {**fields, "fingerprint": end.fingerprint}
    fields = {**_who("update_failed", end.update), "outcome": end.outcome.value, "phase": end.update.phase.value}
    if end.error is not None:
        fields |= {"code": end.error.code.value, "reason": end.error.message}
    return logging.WARNING, {**fields, **took}


def write(happening: Happening) -> None:
    """Log a happening; formatters for JSON find its fields under ``weightpush``."""
    found = line(happening)
    if found is not None:
        level, fields = found
        logger.log(level, "%s", logfmt(fields), extra={"weightpush": fields})
