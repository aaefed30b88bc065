"""The arithmetic of GRPO, without any I/O."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

#: How far a token's probability may move from the one it was sampled with before its gradient is cut.
CLIP: Final = 0.2


def group_advantages(rewards: Tensor) -> Tensor:
    """Return each answer's reward relative to its group's: ``(r - mean) / (std + 1e-4)``.

    Args:
        rewards: shape ``(groups, answers)``; a group is all answers to one prompt.
    """
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, correction=0, keepdim=True)
    return (rewards - mean) / (std + 1e-4)


def token_logprobs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of every token but the first, given those before it.

    Args:
        tokens: ids, shape ``(sequences, length)``.

    Returns:
        Shape ``(sequences, length - 1)``.
    """
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def policy_loss(logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, clip: float = CLIP) -> Tensor:
    """Return GRPO's clipped loss, averaged over all tokens, without a KL term.

    With one update per rollout and servers that have the trainer's weights, the ratio is one and this is REINFORCE with
    the groups' mean as baseline. The further the servers lag behind, the less of the gradient is left.

    Args:
        logprobs: of the sampled tokens under the trainer's weights, shape ``(answers, tokens)``.
        sampled_logprobs: the same tokens under the weights that sampled them, as the server gave them.
        advantages: one per answer, shape ``(answers,)``.
    """
    ratio = (logprobs - sampled_logprobs).exp()
    advantage = advantages[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
