"""Digests of weights that do not travel: a server compares them with what it holds, or reads from its own disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightpush_client.align import Outgoing
from weightpush_client.sources import WeightSource
from weightpush_protocol.digest import tensor_digest


@torch.no_grad()
def digests_of(source: WeightSource, outgoing: Sequence[Outgoing]) -> dict[str, str]:
    """Return the digest of every tensor of ``source`` as a push of ``outgoing`` would send it. Reads all of them once.

    Raises:
        WeightPushError: ``weights_rejected``: the source cannot be read.
    """
    digests: dict[str, str] = {}
    tensors = source.tensors([item.held.name for item in outgoing])
    for item, (_, tensor) in zip(outgoing, tensors, strict=True):
        digests[item.sent.name] = tensor_digest(tensor.to(item.sent.torch_dtype))
    return digests
