"""A trainer whose output head has left its embedding learns so before anything is sent."""

from __future__ import annotations

import pytest
import torch

from weightpush_client.align import align, check_tied
from weightpush_client.sources import open_source
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import ManifestAnswer

EMBEDDING = torch.arange(12.0).view(4, 3)
SPEC = TensorSpec(name="model.embed_tokens.weight", dtype="bfloat16", shape=(4, 3))
EXPECTED = ManifestAnswer(
    tensors=[SPEC], optional=[SPEC.model_copy(update={"name": "lm_head.weight"})], tied={"lm_head.weight": SPEC.name}
)


def check(weights: dict[str, torch.Tensor], expected: ManifestAnswer = EXPECTED) -> None:
    source = open_source(weights)
    check_tied(source, align(source, expected), expected.tied)


@pytest.mark.parametrize(
    "head",
    [
        EMBEDDING,  # One tensor under two names: travels once.
        EMBEDDING.clone(),
        EMBEDDING.to(torch.bfloat16),  # What counts is what is sent.
        EMBEDDING.t().contiguous().t(),
    ],
    ids=["shared", "copied", "cast", "strided"],
)
def test_equal_weights_pass(head: torch.Tensor) -> None:
    check({SPEC.name: EMBEDDING, "lm_head.weight": head})
    check({SPEC.name: EMBEDDING})
    check({"lm_head.weight": head})


def test_a_head_that_differs_is_refused_by_name() -> None:
    head = EMBEDDING.clone()
    head[2, 1] += 1
    with pytest.raises(WeightPushError, match=r"differs from 'model\.embed_tokens") as caught:
        check({SPEC.name: EMBEDDING, "lm_head.weight": head})
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED
    assert caught.value.details == {"tensor": "lm_head.weight", "tied_to": SPEC.name}
    check({SPEC.name: EMBEDDING, "lm_head.weight": head}, EXPECTED.model_copy(update={"tied": {}}))


def test_a_head_of_another_shape_is_left_to_the_server() -> None:
    check({SPEC.name: EMBEDDING, "lm_head.weight": EMBEDDING[:3].clone()})
