"""Rollouts over HTTP, from several servers at once, each labelled with the weight version that made it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import httpx

VERSION_HEADER: Final = "X-Weight-Version"


class RolloutError(Exception):
    """No server answered in time, or one answered with other weights than expected."""


class Refused(Exception):
    """A server did not answer, refused (503: it has no complete weights), or an update cut its answer short."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer: token ids, their log-probabilities under the weights ``version``, and the server that has them."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: str
    server: str


class Rollouts:
    """Asks vLLM servers for answers. What one server refuses is asked of the next.

    Args:
        model: name under which the servers know the model.
        deadline_s: how long one batch may take, with all asking again.
    """

    def __init__(self, model: str, *, deadline_s: float = 120) -> None:
        self._model = model
        self._deadline_s = deadline_s
        self._client = httpx.Client(trust_env=False, timeout=deadline_s)
        #: How often a share of a batch was asked again elsewhere.
        self.asked_again = 0

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def collect(
        self, servers: Sequence[str], prompts: Sequence[list[int]], *, answers: int, tokens: int, version: str
    ) -> list[Rollout]:
        """Return ``answers`` rollouts of ``tokens`` tokens for each prompt, in the order of ``prompts``.

        Those of a prompt follow each other. Each server gets an equal share of the prompts.

        Raises:
            RolloutError: no server answered before the deadline, or weights other than ``version`` did.
        """
        count = len(servers)

        def share(turn: int) -> list[list[Rollout]]:
            return self._share([*servers[turn:], *servers[:turn]], prompts[turn::count], answers, tokens, version)

        with ThreadPoolExecutor(count) as pool:
            jobs = [pool.submit(share, turn) for turn in range(count)]
            shares = [job.result() for job in jobs]
        return [rollout for number in range(len(prompts)) for rollout in shares[number % count][number // count]]

    def prompt_logprobs(self, server: str, sequences: Sequence[list[int]], *, version: str) -> list[list[float]]:
        """Return the log-probability of every token but the first of each sequence, under the weights of ``server``.

        Raises:
            Refused: it does not answer, or serves nothing.
            RolloutError: it serves other weights than ``version``.
        """
        choices = self._ask(server, version, prompt=list(sequences), max_tokens=1, prompt_logprobs=0)
        return [
            [
                position[str(token)]["logprob"]
                for position, token in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
            ]
            for choice, ids in zip(choices, sequences, strict=True)
        ]

    def _share(
        self, servers: Sequence[str], prompts: Sequence[list[int]], answers: int, tokens: int, version: str
    ) -> list[list[Rollout]]:
        """Return a group of rollouts per prompt, from the first of ``servers`` that gives all of them."""
        deadline = time.monotonic() + self._deadline_s
        options = {"n": answers, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
        turn = 0
        while prompts:
            server = servers[turn % len(servers)]
            try:
                choices = self._ask(server, version, prompt=list(prompts), return_token_ids=True, **options)
                return [
                    [
                        Rollout(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], version, server)
                        for choice in choices[number * answers : (number + 1) * answers]
                    ]
                    for number, prompt in enumerate(prompts)
                ]
            except Refused as error:
                if time.monotonic() > deadline:
                    raise RolloutError(f"no server answered for {self._deadline_s:.0f} s; {server}: {error}") from error
                self.asked_again += 1
                turn += 1
                # Once all have refused, give them time.
                time.sleep(0.2 if turn % len(servers) == 0 else 0)
        return []

    def _ask(self, server: str, version: str, **options: Any) -> list[dict[str, Any]]:
        try:
            response = self._client.post(f"{server}/v1/completions", json={"model": self._model, **options})
        except httpx.TransportError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise Refused(f"refused with 503: {response.text[:200]}")
        if response.is_error:
            raise RolloutError(f"{server} answered {response.status_code}: {response.text[:500]}")
        served = response.headers[VERSION_HEADER]
        if served != version:
            raise RolloutError(f"{server} answered with the weights {served!r}, expected {version!r}")
        choices: list[dict[str, Any]] = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        if any(choice["finish_reason"] == "abort" for choice in choices):
            raise Refused("an update aborted some of the answers")
        return choices
