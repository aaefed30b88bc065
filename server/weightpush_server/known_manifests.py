"""The manifests that a worker took last, by their digest: a trainer's next ``begin`` need not bring its own again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest

#: How many are kept, and how large they may be together, in bytes of their JSON.
KEPT: Final = 4
KEPT_BYTES: Final = 128 * 2**20


class KnownManifests:
    """The last few manifests that were admitted, the one used last at the end."""

    def __init__(self, *, limit: int = KEPT, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, tuple[Manifest, int]] = OrderedDict()

    def keep(self, manifest: Manifest, json_bytes: int) -> None:
        """Remember ``manifest``, whose JSON has about ``json_bytes`` bytes; forget what does not fit beside it."""
        if json_bytes > self._limit_bytes:
            return
        digest = manifest.digest()
        self._kept[digest] = manifest, json_bytes
        self._kept.move_to_end(digest)
        while len(self._kept) > self._limit or sum(size for _, size in self._kept.values()) > self._limit_bytes:
            self._kept.popitem(last=False)

    def find(self, digest: str) -> Manifest:
        """Return the manifest of that digest. Raises ``WeightPushError`` (``unknown_manifest``)."""
        if digest not in self._kept:
            raise WeightPushError(
                ErrorCode.UNKNOWN_MANIFEST,
                f"this server does not know the manifest {digest}: begin again with the manifest itself",
                details={"manifest_digest": digest},
            )
        self._kept.move_to_end(digest)
        return self._kept[digest][0]
