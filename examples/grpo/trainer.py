"""The trainer: one process (a Ray actor in `run`) that learns from rollouts and pushes its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from grpo.learning import group_advantages, policy_loss, token_logprobs
from grpo.rollouts import Rollout
from grpo.task import make_model, reward
from weightpush_client import PushReport, WeightPusher


class Fleet(Protocol):
    """What the trainer needs of `weightpush_client.ray.ServerFleet`."""

    def pusher(self, *, transport: str, mode: str) -> WeightPusher:
        """Return a pusher whose servers are those of the fleet."""
        ...


class Trainer:
    """Holds the float32 weights and their optimizer.

    Args:
        seed: of the weights; those of the checkpoint that the servers were started on.
        answers: how many rollouts each prompt has.
    """

    def __init__(self, fleet: Fleet, *, seed: int, answers: int, transport: str, mode: str) -> None:
        torch.set_num_threads(1)
        self._model = make_model(seed).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
        self._answers = answers
        self._pusher = fleet.pusher(transport=transport, mode=mode)

    def train(self, rollouts: Sequence[Rollout]) -> float:
        """Make one step on rollouts that are grouped by prompt; return their mean reward."""
        rewards = torch.tensor([reward(rollout.prompt, rollout.tokens) for rollout in rollouts])
        advantages = group_advantages(rewards.view(-1, self._answers)).flatten()
        tokens = torch.tensor([rollout.prompt + rollout.tokens for rollout in rollouts])
        sampled_logprobs = torch.tensor([rollout.logprobs for rollout in rollouts])

        logprobs = token_logprobs(self._model, tokens)[:, -sampled_logprobs.shape[1] :]
        policy_loss(logprobs, sampled_logprobs, advantages).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(rewards.mean())

    def push(self, version: str) -> PushReport:
        """Bring the weights to every server of the fleet; return when they serve them."""
        return self._pusher.push(self._model, weight_version=version)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return what `Rollouts.prompt_logprobs` returns, under the trainer's own weights."""
        logprobs: list[list[float]] = token_logprobs(self._model, torch.tensor(sequences)).tolist()
        return logprobs
