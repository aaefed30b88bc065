"""Output heads that are the input embedding: which tensor a push may bring twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.dtypes import dtype_name
from weightpush_protocol.manifest import TensorSpec

#: The name under which checkpoints store an output head.
HEAD_NAME: Final = "lm_head.weight"


@dataclass(frozen=True)
class TiedHead:
    """A head without bytes of its own.

    ``spec`` is what a push may bring under the head's name. ``must_equal``: a cold start on a checkpoint whose head
    differs from its embedding would untie them, so the running model cannot take it; where False, the architecture has
    no head at all and a cold start ignores the tensor.
    """

    spec: TensorSpec
    embedding: VocabParallelEmbedding
    must_equal: bool

    def offered_digest(self, head: torch.Tensor) -> str:
        """Return the digest of this rank's rows of ``head``, the full ``[vocabulary, hidden]`` tensor of a push."""
        indices = self.embedding.shard_indices
        return tensor_digest(head[indices.org_vocab_start_index : indices.org_vocab_end_index])

    def landed_digest(self) -> str:
        """Return the digest of the embedding's rows as they are now, in checkpoint layout, without padding."""
        indices = self.embedding.shard_indices
        return tensor_digest(self.embedding.weight[: indices.org_vocab_end_index - indices.org_vocab_start_index])


def find_tied_head(model: nn.Module, checkpoint: tuple[TensorSpec, ...] | None) -> TiedHead | None:
    """Return how the output head of ``model`` is tied, or None where it has weights of its own."""
    embeddings: list[VocabParallelEmbedding] = []
    heads: list[ParallelLMHead] = []
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            heads.append(module)
        elif isinstance(module, VocabParallelEmbedding):
            embeddings.append(module)
    if len(heads) > 1 or not embeddings:
        return None
    if heads:
        weight = getattr(heads[0], "weight", None)
        owners = [module for module in embeddings if weight is not None and getattr(module, "weight", None) is weight]
        must_equal = True
    else:
        config = getattr(model, "config", None)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        head_is_embedding = getattr(model, "lm_head", None) is embeddings[0]
        owners = embeddings[:1] if len(embeddings) == 1 and (tied or head_is_embedding) else []
        must_equal = False
    if len(owners) != 1:
        return None
    owner = owners[0]
    return TiedHead(
        spec=TensorSpec(
            name=HEAD_NAME,
            dtype=_embedding_dtype(owner, checkpoint or ()),
            shape=(owner.org_vocab_size, owner.embedding_dim),
        ),
        embedding=owner,
        must_equal=must_equal,
    )


def _embedding_dtype(embedding: VocabParallelEmbedding, checkpoint: tuple[TensorSpec, ...]) -> str:
    """Return the dtype in which the checkpoint stores the embedding: a head comes in the same."""
    shape = (embedding.org_vocab_size, embedding.embedding_dim)
    dtypes = {spec.dtype for spec in checkpoint if spec.shape == shape and "embed" in spec.name}
    return dtypes.pop() if len(dtypes) == 1 else dtype_name(embedding.weight.dtype)
