"""A trainer that trains nothing: it takes a checkpoint, moves its weights a little, and pushes them, step by step.

Put your own training in the place of `change`. The control token comes from ``WEIGHTPUSH_CONTROL_TOKEN`` or
``--token-file``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from weightpush_client import PushError, WeightPusher


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint directory."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{directory} has no *.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def change(weights: dict[str, torch.Tensor], step: int) -> None:
    """Move every weight by up to a hundredth of its size, as if this were an optimizer's step."""
    torch.manual_seed(step)
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor.mul_(1 + 0.02 * (torch.rand(tensor.shape) - 0.5).to(tensor.dtype))


def count(steps: int) -> Iterator[int]:
    """Yield 1, 2, ... up to ``steps``; without end for 0."""
    step = 0
    while not steps or step < steps:
        step += 1
        yield step


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options in ``words``, or on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--url", action="append", required=True, help="a server; repeat it for several")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--steps", type=int, default=0, help="0: without end")
    parser.add_argument("--pause", type=float, default=10.0, metavar="SECONDS", help="between two steps")
    return parser.parse_args(words)


def main() -> None:
    """Push until it is enough."""
    options = read_options()
    weights = read(options.checkpoint)
    with WeightPusher(options.url, token_file=options.token_file, on_server_failure="exclude") as pusher:
        for step in count(options.steps):
            change(weights, step)
            try:
                print(pusher.push(weights, weight_version=f"step-{step}"), flush=True)
            except PushError as error:
                print(f"step {step} was not pushed, the next one is: {error}", flush=True)
            if step != options.steps:
                time.sleep(options.pause)


if __name__ == "__main__":
    main()
