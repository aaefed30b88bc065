"""Which servers are behind, and whether weights are those that the others serve. Decisions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.status import Status


@dataclass(frozen=True, slots=True)
class LastPush:
    """What a pusher pushed last.

    Attributes:
        digests: of every tensor that the servers serve, by its name in the checkpoint; of fewer where ``complete`` is
            False, because a partial push came first.
        fingerprints: what each server that committed it then served, by its ``instance_id``.
    """

    weight_version: str
    digests: Mapping[str, str]
    complete: bool
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def after(
        cls,
        before: LastPush | None,
        weight_version: str,
        digests: Mapping[str, str],
        *,
        partial: bool,
        fingerprints: Mapping[str, str],
    ) -> LastPush:
        """Return what was pushed last once ``digests`` were pushed, too; a partial push changes some of ``before``."""
        if not partial:
            return cls(weight_version, digests, True, dict(fingerprints))
        kept = before.digests if before is not None else {}
        complete = before is not None and before.complete
        return cls(weight_version, {**kept, **digests}, complete, dict(fingerprints))

    def joined_by(self, fingerprints: Mapping[str, str]) -> LastPush:
        """Return the same, served by more servers."""
        return LastPush(self.weight_version, self.digests, self.complete, {**self.fingerprints, **fingerprints})

    def is_served_by(self, status: Status) -> bool:
        """Whether a server serves this; another one's bytes under the same label do not count."""
        if not status.serving or status.weight_version != self.weight_version:
            return False
        known = self.fingerprints.get(status.instance_id)
        if known is not None:
            return status.fingerprint in {None, known}
        # It was started or labelled by somebody else: that label may stand for any bytes.
        return status.fingerprint in self.fingerprints.values()

    def check_same(self, digests: Mapping[str, str]) -> None:
        """Look whether tensors with these ``digests`` are what was pushed.

        Raises:
            PushError: ``weights_rejected``: they are not; the first difference is named.
        """
        for name in [*self.digests, *digests]:
            if self.digests.get(name) != digests.get(name):
                what = (
                    "is missing" if name not in digests else "was not pushed" if name not in self.digests else "differs"
                )
                raise PushError(
                    ErrorCode.WEIGHTS_REJECTED,
                    f"these are not the weights that were pushed last as {self.weight_version!r}: {name!r} {what}; "
                    "push them as a version of their own",
                    details={"tensor": name, "weight_version": self.weight_version},
                )


def catch_up_target(last: LastPush | None) -> LastPush:
    """Return what servers can be brought to.

    Raises:
        PushError: ``invalid_request``: nothing was pushed, or what was pushed is not known to the byte.
    """
    if last is None:
        raise PushError(
            ErrorCode.INVALID_REQUEST, "this pusher has pushed nothing yet that servers could catch up with"
        )
    if not last.digests:
        raise PushError(
            ErrorCode.INVALID_REQUEST,
            f"{last.weight_version!r} was pushed without digests, so nobody can tell whether these are the same "
            "weights: push with digest='wp64'",
        )
    if not last.complete:
        raise PushError(
            ErrorCode.INVALID_REQUEST,
            f"{last.weight_version!r} was a partial push, and this pusher never pushed the rest: push everything once",
        )
    return last


def stale_for_partial(last: LastPush | None, statuses: Sequence[Status]) -> dict[int, PushError]:
    """Return the servers that a partial push must leave out, by their place: it would build on other weights there."""
    if last is None:
        # Nothing is known of the bytes; but two versions are never the same base.
        versions = {status.weight_version for status in statuses}
        return {} if len(versions) < 2 else _other_versions(statuses)
    return {
        place: PushError(
            ErrorCode.PARTIAL_REFUSED,
            f"the server is {status.state.value} with version {status.weight_version!r}, and this partial push "
            f"builds on {last.weight_version!r}: let it catch up first",
            state=status.state,
        )
        for place, status in enumerate(statuses)
        if not last.is_served_by(status)
    }


def _other_versions(statuses: Sequence[Status]) -> dict[int, PushError]:
    """Return the servers with another version than most have, by their place."""
    versions = [status.weight_version for status in statuses]
    most = max(versions, key=versions.count)
    return {
        place: PushError(
            ErrorCode.PARTIAL_REFUSED,
            f"the server has version {version!r} and most have {most!r}: a partial push would leave them with "
            "different weights; push everything once",
            state=statuses[place].state,
        )
        for place, version in enumerate(versions)
        if version != most
    }


def version_line(results: Sequence[tuple[str, Status | WeightPushError]]) -> str:
    """Say in one line whether all servers serve one version, and which are behind; ``results`` by address.

    The version that counts is the one that was committed last.
    """
    serving = [status for _, status in results if isinstance(status, Status) and status.serving]
    if not serving:
        return "no server serves"

    def committed(status: Status) -> float:
        return status.last_update.finished_at.timestamp() if status.last_update is not None else 0.0

    newest = max(serving, key=committed).weight_version
    behind = [f"{url} ({why})" for url, result in results if (why := _why_behind(result, newest))]
    if not behind:
        return f"all {len(results)} serve {newest}" if len(results) > 1 else f"serves {newest}"
    return f"{len(results) - len(behind)} of {len(results)} serve {newest}; behind: {', '.join(behind)}"


def _why_behind(result: Status | WeightPushError, newest: str) -> str | None:
    if isinstance(result, WeightPushError):
        return "no answer"
    if not result.serving:
        return result.state.value
    return None if result.weight_version == newest else f"serves {result.weight_version}"
