"""What goes over the wire: the source's tensors under the names and dtypes of the server's checkpoint.

The trainer decides three things only, and all of them are visible in the manifest that the server then judges:

* the name (wrappers are stripped, see `weightpush_client.names`);
* the dtype: a float64, float32, bfloat16 or float16 tensor is cast to the one of these that the server expects, with
  the result of ``tensor.to(dtype)``. Nothing is ever cast to or from an integer or an 8-bit float, whose values mean
  nothing without their scales: such a tensor is sent as it is, and the server refuses it by name;
* tied weights: a second name of a tensor that travels anyway is left out where the server does not ask for it.

Whatever else the server does not know is sent in the manifest, so that the server names it; nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weightpush_client.names import checkpoint_name
from weightpush_client.sources import WeightSource
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import ManifestAnswer

_CAST: Final = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor of a push: ``held`` as the source has it, ``sent`` as it travels. Both have the same shape."""

    held: TensorSpec
    sent: TensorSpec


def align(source: WeightSource, expected: ManifestAnswer) -> list[Outgoing]:
    """Return what to send, in the order of the source.

    Raises:
        WeightPushError: ``weights_rejected``: the source is empty, or two of its tensors have one checkpoint name.
    """
    required = {spec.name: spec for spec in expected.tensors}
    known = {**{spec.name: spec for spec in expected.optional}, **required}
    named = _name_all(source, known)
    travelling = {identity for name, _, identity in named if name in required and identity is not None}
    outgoing = []
    for name, held, identity in named:
        if name not in required and identity in travelling:
            continue
        wanted = known.get(name)
        dtype = wanted.dtype if wanted is not None and {wanted.dtype, held.dtype} <= _CAST else held.dtype
        outgoing.append(Outgoing(held=held, sent=TensorSpec(name=name, dtype=dtype, shape=held.shape)))
    return outgoing


def _name_all(source: WeightSource, known: dict[str, TensorSpec]) -> list[tuple[str, TensorSpec, Hashable | None]]:
    taken: dict[str, tuple[TensorSpec, Hashable | None]] = {}
    for held in source.specs():
        name = checkpoint_name(held.name, known)
        identity = source.identity(held.name)
        if name in taken:
            first, first_identity = taken[name]
            if identity is None or identity != first_identity:
                raise WeightPushError(
                    ErrorCode.WEIGHTS_REJECTED,
                    f"two different tensors are both {name!r} without their wrappers: {first.name!r} and {held.name!r}",
                    details={"tensor": name, "names": [first.name, held.name]},
                )
            continue
        taken[name] = (held, identity)
    if not taken:
        raise WeightPushError(ErrorCode.WEIGHTS_REJECTED, "there are no weights to push: the source is empty")
    return [(name, held, identity) for name, (held, identity) in taken.items()]


def check_tied(source: WeightSource, outgoing: Sequence[Outgoing], tied: Mapping[str, str]) -> None:
    """Look whether tensors that the servers hold once are the same here, before anything is sent.

    Raises:
        WeightPushError: ``weights_rejected``: they differ. A server would only find out when all bytes have landed.
    """
    if not tied:
        return
    sent = {item.sent.name: item for item in outgoing}
    for name, twin in tied.items():
        if name not in sent or twin not in sent or sent[name].sent.shape != sent[twin].sent.shape:
            continue
        digests = []
        for item in (sent[name], sent[twin]):
            (_, tensor), *_ = source.tensors([item.held.name])
            digests.append(tensor_digest(tensor.to(sent[twin].sent.torch_dtype).contiguous()))
        if digests[0] != digests[1]:
            raise WeightPushError(
                ErrorCode.WEIGHTS_REJECTED,
                f"{name!r} differs from {twin!r}, but the server's model has one tensor for both: push them equal (tie "
                f"the trainer's), leave {name!r} out, or start the server on a checkpoint that holds both",
                details={"tensor": name, "tied_to": twin},
            )


def agreed_manifest(manifests: Sequence[tuple[str, ManifestAnswer]]) -> ManifestAnswer:
    """Return the checkpoint that all servers expect, given ``(url, manifest)`` of each.

    Raises:
        WeightPushError: ``manifest_rejected``: two servers expect different checkpoints; the first difference is named.
    """
    for other in manifests[1:]:
        if other[1] is not manifests[0][1] and (error := _difference(manifests[0], other)) is not None:
            raise error
    return manifests[0][1]


def _difference(first: tuple[str, ManifestAnswer], second: tuple[str, ManifestAnswer]) -> WeightPushError | None:
    for kind in ("tensors", "optional"):
        ours = {spec.name: spec for spec in getattr(first[1], kind)}
        theirs = {spec.name: spec for spec in getattr(second[1], kind)}
        if ours == theirs:
            continue
        name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
        return WeightPushError(
            ErrorCode.MANIFEST_REJECTED,
            f"the servers expect different checkpoints, first at {name!r}: {first[0]} expects "
            f"{_describe(ours.get(name))}, {second[0]} expects {_describe(theirs.get(name))}",
            details={"tensor": name, "servers": [first[0], second[0]]},
        )
    return None


def majority(manifests: Sequence[tuple[str, ManifestAnswer]]) -> tuple[ManifestAnswer, dict[str, WeightPushError]]:
    """Return the checkpoint that most servers expect, and by address why each of the others does not fit.

    Raises:
        WeightPushError: ``manifest_rejected``: there is no majority; the first difference is named.
    """
    alike: list[list[tuple[str, ManifestAnswer]]] = []
    for pair in manifests:
        for group in alike:
            if group[0][1] is pair[1] or _difference(group[0], pair) is None:
                group.append(pair)
                break
        else:
            alike.append([pair])
    alike.sort(key=len, reverse=True)
    most, *others = alike
    refused = {pair[0]: error for group in others for pair in group if (error := _difference(most[0], pair))}
    if others and len(others[0]) == len(most):
        raise next(iter(refused.values()))
    return most[0][1], refused


def _describe(spec: TensorSpec | None) -> str:
    return "no such tensor" if spec is None else f"{spec.dtype} {list(spec.shape)}"
