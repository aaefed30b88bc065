"""The pieces of examples/grpo: its arithmetic, its rollouts over real sockets, and what makes a run fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grpo_ray
from grpo.learning import group_advantages, policy_loss, token_logprobs
from grpo.report import GAP_MAX, GAP_MEAN, Gap, Run, Step, plot
from grpo.rollouts import VERSION_HEADER, Refused, RolloutError, Rollouts
from grpo.task import LETTERS, VOCABULARY, make_model, make_prompts, probe_tokens, reward


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_advantages(torch.tensor([[0.0, 1.0], [0.25, 0.25], [100.0, 98.0]]))
    expected = torch.tensor([[-1.0, 1.0], [0.0, 0.0], [1.0, -1.0]])
    torch.testing.assert_close(advantages, expected, atol=3e-4, rtol=0)
    # Not so for a group that nearly agrees: there 1e-4 is not small beside the deviation.
    assert group_advantages(torch.tensor([[0.0, 2e-4]])).abs().max() == pytest.approx(0.5, abs=1e-3)


def test_on_policy_the_loss_has_the_gradient_of_reinforce() -> None:
    torch.manual_seed(0)
    logprobs = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
    (clipped,) = torch.autograd.grad(policy_loss(logprobs, logprobs.detach(), advantages), logprobs)
    (reinforce,) = torch.autograd.grad(-(advantages[:, None] * logprobs).mean(), logprobs)
    torch.testing.assert_close(clipped, reinforce)
    sampled = logprobs.detach() - 0.05
    assert torch.autograd.gradcheck(lambda now: policy_loss(now, sampled, advantages), (logprobs,))


def test_a_token_that_moved_too_far_is_pushed_no_further() -> None:
    moved = torch.tensor([[0.5, -0.5], [0.5, -0.5]]).requires_grad_()
    policy_loss(moved, torch.zeros(2, 2), torch.tensor([1.0, -1.0])).backward()
    assert moved.grad is not None
    # Already likelier and wanted, already unlikelier and unwanted: cut. The other way back: not cut.
    assert (moved.grad != 0).tolist() == [[False, True], [True, False]]


class _Bigram(nn.Module):
    """Next-token logits that are a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 1.0], [0.0, 0.0, 5.0]]))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def test_a_token_has_the_logprob_that_those_before_it_gave() -> None:
    model = _Bigram()
    logprobs = token_logprobs(model, torch.tensor([[0, 2, 2], [1, 0, 1]]))
    rows = model.table.log_softmax(-1)
    torch.testing.assert_close(logprobs, torch.stack([rows[[0, 2], [2, 2]], rows[[1, 0], [0, 1]]]))


def test_prompts_and_rewards() -> None:
    import random

    prompts = make_prompts(32, random.Random(0))
    assert {VOCABULARY[letter] for letter, _ in prompts} == set(LETTERS)
    assert all(VOCABULARY[sign] == "=" and prompts.count([letter, sign]) == 4 for letter, sign in prompts)
    assert prompts != make_prompts(32, random.Random(1))
    assert reward([7, 5], [7, 7, 5, 7]) == 0.75


@pytest.mark.parametrize("stale", ["model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"])
def test_one_tensor_that_is_a_step_old_breaks_the_bounds(stale: str) -> None:
    model, probes = make_model(0), torch.tensor(probe_tokens())
    with torch.no_grad():
        fresh = token_logprobs(model, probes)
        model.get_parameter(stale).add_(5e-3 * torch.randn(model.get_parameter(stale).shape).sign())
        old = token_logprobs(model, probes)
    difference = (fresh - old).abs()
    assert not (difference.mean() < GAP_MEAN and difference.max() < GAP_MAX)


# Rollouts

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, str], dict[str, Any]]]


class _Vllm:
    """Answers ``/v1/completions`` as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                status, headers, answered = answer(body)
                payload = json.dumps(answered).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(payload))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def echo(version: str, finish: str = "length") -> Answer:
    """Return answers that say which prompt and which number they belong to."""

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], dict[str, Any]]:
        choices = [
            {
                "index": number * body["n"] + which,
                "token_ids": [prompt[0], which],
                "logprobs": {"token_logprobs": [-1.0, -float(which)]},
                "finish_reason": finish,
            }
            for number, prompt in enumerate(body["prompt"])
            for which in range(body["n"])
        ]
        return 200, {VERSION_HEADER: version}, {"choices": choices[::-1]}

    return answer


def refuse(_: dict[str, Any]) -> tuple[int, dict[str, str], dict[str, Any]]:
    return 503, {"Retry-After": "1"}, {"error": {"code": "gate_closed"}}


@pytest.fixture
def vllm() -> Iterator[Callable[[Answer], _Vllm]]:
    started: list[_Vllm] = []

    def start(answer: Answer) -> _Vllm:
        started.append(_Vllm(answer))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def rollouts() -> Iterator[Rollouts]:
    with Rollouts("model", deadline_s=1.0) as rollouts:
        yield rollouts


def collect(rollouts: Rollouts, *servers: str, version: str = "step-3") -> list[tuple[list[int], list[int], str]]:
    found = rollouts.collect(servers, [[10], [20], [30], [40], [50]], answers=2, tokens=2, version=version)
    assert {rollout.version for rollout in found} == {version}
    return [(rollout.prompt, rollout.tokens, rollout.server) for rollout in found]


def test_rollouts_come_in_the_order_of_prompts_from_all_servers(
    vllm: Callable[[Answer], _Vllm], rollouts: Rollouts
) -> None:
    one, two = vllm(echo("step-3")), vllm(echo("step-3"))
    found = collect(rollouts, one.url, two.url)
    assert [(prompt, tokens) for prompt, tokens, _ in found] == [
        ([number], [number, which]) for number in (10, 20, 30, 40, 50) for which in (0, 1)
    ]
    assert [server for *_, server in found] == [url for url in (one.url, two.url) * 3 for _ in range(2)][:10]
    assert len(one.asked) == len(two.asked) == 1
    assert rollouts.asked_again == 0


@pytest.mark.parametrize("why", ["refused", "cut short", "gone"])
def test_what_a_server_refuses_is_asked_of_another(
    vllm: Callable[[Answer], _Vllm], rollouts: Rollouts, why: str
) -> None:
    bad = vllm(refuse if why == "refused" else echo("step-3", finish="abort"))
    if why == "gone":
        bad.stop()
    good = vllm(echo("step-3"))
    found = collect(rollouts, bad.url, good.url)
    assert {server for *_, server in found} == {good.url}
    assert [prompt for prompt, *_ in found] == [[number] for number in (10, 20, 30, 40, 50) for _ in range(2)]
    assert rollouts.asked_again == 1


def test_rollouts_of_other_weights_are_an_error(vllm: Callable[[Answer], _Vllm], rollouts: Rollouts) -> None:
    right, wrong = vllm(echo("step-3")), vllm(echo("step-2"))
    with pytest.raises(RolloutError, match=rf"{wrong.url} answered with the weights 'step-2', expected 'step-3'"):
        collect(rollouts, right.url, wrong.url)


def test_servers_that_only_refuse_are_given_up(vllm: Callable[[Answer], _Vllm], rollouts: Rollouts) -> None:
    server = vllm(refuse)
    with pytest.raises(RolloutError, match=r"no server answered for 1 s; .*503"):
        collect(rollouts, server.url)
    assert len(server.asked) > 2


def test_prompt_logprobs_leave_out_the_first_token(vllm: Callable[[Answer], _Vllm], rollouts: Rollouts) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], dict[str, Any]]:
        positions = [[None, *({str(token): {"logprob": -token / 10}} for token in ids[1:])] for ids in body["prompt"]]
        choices = [
            {"index": number, "prompt_logprobs": found, "finish_reason": "length"}
            for number, found in enumerate(positions)
        ]
        return 200, {VERSION_HEADER: "step-3"}, {"choices": choices}

    server = vllm(answer)
    assert rollouts.prompt_logprobs(server.url, [[1, 2, 3], [4, 5, 6]], version="step-3") == [
        [-0.2, -0.3],
        [-0.5, -0.6],
    ]


def test_prompt_logprobs_of_other_weights_are_an_error_and_of_no_server_are_not(
    vllm: Callable[[Answer], _Vllm], rollouts: Rollouts
) -> None:
    with pytest.raises(RolloutError, match="answered with the weights 'step-2', expected 'step-3'"):
        rollouts.prompt_logprobs(vllm(lambda _: (200, {VERSION_HEADER: "step-2"}, {})).url, [[1, 2]], version="step-3")
    with pytest.raises(Refused, match="refused with 503"):
        rollouts.prompt_logprobs(vllm(refuse).url, [[1, 2]], version="step-3")


# What must hold at the end


def a_run(
    *, rewards: tuple[float, float] = (0.06, 0.99), pushing: bool = True, killed_at: int | None = None, back: int = 8
) -> Run:
    """Return twelve steps of two servers whose reward is one thing and then another; ``back``: as of which step."""
    steps = []
    for number in range(1, 13):
        away = killed_at is not None and killed_at <= number < back
        gaps = tuple(Gap(url, "", 1e-7, 1e-6) for url in ("http://one", "http://two")[: 1 if away else 2])
        steps.append(
            Step(
                step=number,
                rollout_version=f"step-{number - 1}",
                reward=rewards[number > 6],
                rollout_seconds=0.3,
                train_seconds=0.1,
                version=f"step-{number}",
                push_seconds=0.2 if pushing else None,
                pause_seconds=0.1 if pushing else None,
                gaps=gaps,
            )
        )
    return Run(tuple(steps), servers=2, pushing=pushing, killed_at=killed_at)


def with_gap(run: Run, gap: Gap) -> Run:
    steps = list(run.steps)
    steps[3] = replace(steps[3], gaps=(steps[3].gaps[0], gap))
    return replace(run, steps=tuple(steps))


def test_good_runs_have_no_complaints() -> None:
    assert a_run().complaints() == []
    assert a_run(killed_at=4).complaints() == []
    assert a_run(rewards=(0.03, 0.04), pushing=False).complaints() == []


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (a_run(rewards=(0.15, 0.99)), "the reward of the first 5 steps is 0.150, expected below 0.15"),
        (a_run(rewards=(0.06, 0.8)), "the reward of the last 5 steps is 0.800, expected above 0.8"),
        (a_run(rewards=(0.03, 0.1), pushing=False), "without pushing, the reward of the last 5 steps is 0.100"),
        (replace(a_run(), steps=a_run().steps[:9]), "9 steps are too few"),
        (
            with_gap(a_run(), Gap("http://two", "", 1e-5, 1e-5)),
            "step 4: http://two differs from the trainer by 1.0e-05 on",
        ),
        (with_gap(a_run(), Gap("http://two", "", 1e-7, 1e-4)), "1.0e-04 at most"),
        (with_gap(a_run(), Gap("http://two", "", float("nan"), float("nan"))), "step 4: http://two differs"),
        (
            replace(a_run(), steps=(replace(a_run().steps[0], gaps=a_run().steps[0].gaps[:1]), *a_run().steps[1:])),
            "step 1: 1 of 2 servers took the push",
        ),
        (a_run(killed_at=4, back=4), "a server was killed at step 4, and yet all took every push"),
        (a_run(killed_at=4, back=99), "step 8: 1 of 2 servers took the push"),
    ],
)
def test_what_is_not_as_it_must_be_is_said_and_ends_the_program_with_1(
    run: Run, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [text for text in run.complaints() if complaint in text]
    monkeypatch.setattr("grpo.run.train", lambda *_: run)
    assert grpo_ray.main([]) == 1
    assert complaint in capsys.readouterr().err


def test_a_good_run_ends_with_0_and_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def train(settings: Any, *_: object) -> Run:
        asked.append(settings)
        return a_run(killed_at=4)

    monkeypatch.setattr("grpo.run.train", train)
    files = ["--plot", str(tmp_path / "made" / "run.png"), "--json", str(tmp_path / "run.json")]
    options = ["--steps", "12", "--servers", "3", "--seed", "7", "--mode", "staged", "--transport", "http"]
    assert grpo_ray.main([*files, *options, "--kill-server-at", "4"]) == 0
    (settings,) = asked
    assert (settings.steps, settings.servers, settings.seed, settings.kill_server_at) == (12, 3, 7, 4)
    assert (settings.mode, settings.transport, settings.pushing) == ("staged", "http", True)
    assert (tmp_path / "made" / "run.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "run.json").read_text())
    assert (len(written["steps"]), written["complaints"]) == (12, [])
    assert "reward 0.060 in the first 5 steps, 0.990 in the last 5; push 0.200 s" in capsys.readouterr().out


def test_a_run_that_breaks_off_ends_with_1_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: object) -> Run:
        raise RolloutError("no server answered for 120 s")

    monkeypatch.setattr("grpo.run.train", train)
    assert grpo_ray.main([]) == 1
    assert "The run failed: no server answered for 120 s" in capsys.readouterr().err


def test_a_control_can_be_plotted_and_summed_up(tmp_path: Path) -> None:
    run = a_run(rewards=(0.03, 0.04), pushing=False)
    plot(run, tmp_path / "control.png")
    assert (tmp_path / "control.png").read_bytes().startswith(b"\x89PNG")
    assert run.summary().endswith("nothing was pushed")
    assert "      -" in str(run.steps[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--steps", "9"], "--steps must be at least 10"),
        (["--servers", "0"], "--servers must be at least 1"),
        (["--kill-server-at", "36"], "between 1 and 35"),
        (["--kill-server-at", "5", "--no-push"], "a killed server comes back without weights"),
        (["--kill-server-at", "5", "--servers", "1"], "another one has to go on"),
    ],
)
def test_impossible_options_are_refused(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        grpo_ray.parse(options)
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err
