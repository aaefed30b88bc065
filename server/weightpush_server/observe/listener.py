"""Tells log and traces what happened in this API process; whoever ended an update speaks of its end, nobody else."""

from __future__ import annotations

from weightpush_server.log import logger
from weightpush_server.observe import lines
from weightpush_server.observe.happenings import Happening
from weightpush_server.observe.spans import SpanWriter


class Listener:
    """Called after each transaction of this process in which something happened; never raises."""

    def __init__(self) -> None:
        self._spans = SpanWriter()

    def __call__(self, happened: list[Happening]) -> None:
        """Write lines and spans."""
        try:
            for happening in happened:
                lines.write(happening)
                self._spans.tell(happening)
        except Exception:  # noqa: BLE001 - what is only watched must not fail for the watching
            logger.exception("what happened could not be logged")
