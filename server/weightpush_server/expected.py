"""The checkpoint that a model expects, as trainers ask for it, and a digest by which they know that it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from weightpush_protocol.messages import ManifestAnswer
from weightpush_server.reload.layout import ModelLayout


class ExpectedCheckpoint:
    """The answer to ``GET /reload/manifest`` for one layout, put together once for each checkpoint."""

    def __init__(self) -> None:
        self._about: object = None
        self._digest: str | None = None

    def describe(self, layout: ModelLayout, tied: Mapping[str, str]) -> str:
        """Return the answer as JSON, with its digest in it."""
        answer = ManifestAnswer(
            tensors=list(layout.checkpoint or ()), optional=list(layout.optional.values()), tied=dict(tied)
        )
        text = answer.model_dump_json(exclude={"digest"})
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._about, self._digest = layout.checkpoint, digest
        return answer.model_copy(update={"digest": digest}).model_dump_json()

    def is_known(self, layout: ModelLayout) -> bool:
        """Whether it was put together for the checkpoint that ``layout`` has now; the first push may bring another."""
        return self._about is layout.checkpoint

    @property
    def digest(self) -> str | None:
        """SHA-256 of the answer that was given last, without the digest in it; None before the first."""
        return self._digest
