"""What a pusher knows before a push because the push before was of the same weights, to the same kind of server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from weightpush_client.align import Outgoing, align
from weightpush_client.copies import Programs
from weightpush_client.sources import WeightSource
from weightpush_client.sources.keeper import SourceKeeper
from weightpush_client.sources.resident import ResidentSource, Skeleton
from weightpush_protocol.manifest import Manifest, build_manifest
from weightpush_protocol.messages import ManifestAnswer

#: Servers of so many different checkpoints are known at the same time.
_CHECKPOINTS: Final = 4


#: Weights are cut into so many buckets at least, if these have a certain size: what is in one can only be landed while
#: the next is on its way.
_BUCKETS: Final = 16
_LEAST_BYTES: Final = 16 * 2**20


class Preparation:
    """Belongs to one pusher, one push at a time. Holds no tensor.

    ``sources`` opens what is pushed, ``programs`` say how it gets into buckets.
    """

    def __init__(self) -> None:
        self.sources = SourceKeeper()
        self.programs = Programs()
        self._checkpoints: OrderedDict[str, ManifestAnswer] = OrderedDict()
        self._about: tuple[Skeleton, ManifestAnswer] | None = None
        self._outgoing: Sequence[Outgoing] = ()
        #: Names that were left out because they are second names of tensors, each with the first one.
        self._twins: Sequence[tuple[str, str]] = ()
        self._manifests: dict[int, Manifest] = {}

    # what servers expect

    def checkpoint(self, digest: str | None) -> ManifestAnswer | None:
        """Return the checkpoint that servers expect whose status says ``digest``, if one has told it before."""
        return self._checkpoints.get(digest) if digest is not None else None

    def learn(self, answer: ManifestAnswer) -> ManifestAnswer:
        """Remember what a server expects; return it, or what another one said in the same words."""
        if answer.digest is None:
            return answer
        known = self._checkpoints.setdefault(answer.digest, answer)
        self._checkpoints.move_to_end(answer.digest)
        while len(self._checkpoints) > _CHECKPOINTS:
            self._checkpoints.popitem(last=False)
        return known

    # what is sent

    def outgoing(self, source: WeightSource, expected: ManifestAnswer) -> Sequence[Outgoing]:
        """Return what to send, see `align`; the same object as for the last push where it is the same.

        Raises:
            WeightPushError: see `align`.
        """
        if not isinstance(source, ResidentSource):
            return align(source, expected)
        about = self._about
        if about is None or about[0] is not source.skeleton or about[1] is not expected or not self._still_tied(source):
            self._about = None
            self._outgoing = align(source, expected)
            twins = _twins(source, self._outgoing)
            if twins is not None:
                self._about, self._twins, self._manifests = (source.skeleton, expected), twins, {}
        return self._outgoing

    def manifest(self, outgoing: Sequence[Outgoing], bucket_bytes: int) -> Manifest:
        """Return the manifest of ``outgoing`` in buckets of at most so many bytes."""
        if self._about is None or outgoing is not self._outgoing:
            return _manifest(outgoing, bucket_bytes)
        if bucket_bytes not in self._manifests:
            self._manifests = {bucket_bytes: _manifest(outgoing, bucket_bytes)}
        return self._manifests[bucket_bytes]

    def _still_tied(self, source: ResidentSource) -> bool:
        return all(
            (identity := source.identity(name)) is not None and identity == source.identity(twin)
            for name, twin in self._twins
        )


def _twins(source: ResidentSource, outgoing: Sequence[Outgoing]) -> list[tuple[str, str]] | None:
    """Return the tensors that are not sent, each with one of the same memory that is; None where one has no such."""
    sent = {item.held.name for item in outgoing}
    left_out = [spec.name for spec in source.specs() if spec.name not in sent]
    if not left_out:
        return []
    names = {source.identity(name): name for name in sent}
    pairs = [(name, names.get(source.identity(name))) for name in left_out]
    return [(name, twin) for name, twin in pairs if twin is not None] if all(twin for _, twin in pairs) else None


def _manifest(outgoing: Sequence[Outgoing], bucket_bytes: int) -> Manifest:
    specs = [item.sent for item in outgoing]
    fair = max(_LEAST_BYTES, sum(spec.nbytes for spec in specs) // _BUCKETS)
    return build_manifest(specs, min(bucket_bytes, fair))
