"""GRPO on two CPU cores: a policy that learns because every step's weights reach the servers. ``make rl``.

Two ``weightpush serve`` processes under Ray make the rollouts, a Ray actor trains and pushes after each step. Printed
after each: the reward, how long the push took and how long the servers paused for it, and how far the servers'
log-probabilities of fixed tokens are from the trainer's. The exit code is 1 where the reward does not rise (or rises
under ``--no-push``), or where a server computes with anything but the weights it was just given. How it works:
``examples/grpo``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from grpo.report import ENDS, MIN_STEPS, plot


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; an impossible one ends the program with code 2."""
    from weightpush_client.transport import TRANSPORTS

    parser = argparse.ArgumentParser(description="Train a tiny policy on rollouts from live vLLM servers.")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")
    parser.add_argument("--servers", type=int, default=2, help="vLLM servers (default 2)")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="of the pushes")
    parser.add_argument("--mode", choices=["direct", "staged"], default="direct", help="of the pushes")
    parser.add_argument("--no-push", action="store_true", help="the control: train, but never push; it must stay flat")
    parser.add_argument("--kill-server-at", type=int, metavar="STEP", help="kill a server during this step's rollouts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the run as a PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write down everything that was measured")
    options = parser.parse_args(arguments)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}, so that its first and last {ENDS} steps can be compared")
    if options.servers < 1:
        parser.error("--servers must be at least 1")
    if options.kill_server_at is not None:
        if options.no_push:
            parser.error("--kill-server-at needs pushes: a killed server comes back without weights")
        if options.servers < 2:
            parser.error("--kill-server-at needs --servers 2 or more: another one has to go on")
        if not 1 <= options.kill_server_at <= options.steps - ENDS:
            parser.error(f"--kill-server-at must be between 1 and {options.steps - ENDS}, so that it can come back")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if everything was as it must be."""
    # Before torch is imported, and for all that Ray starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse(arguments)
    from ray.exceptions import RayError

    from grpo.rollouts import RolloutError
    from grpo.run import Settings, train
    from weightpush_client import WeightPushError

    settings = Settings(
        steps=options.steps,
        seed=options.seed,
        servers=options.servers,
        transport=options.transport,
        mode=options.mode,
        pushing=not options.no_push,
        kill_server_at=options.kill_server_at,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="weightpush-grpo-") as folder:
            run = train(settings, Path(folder), lambda line: print(line, flush=True))
    except (RolloutError, WeightPushError, RayError) as error:
        print(f"\nThe run failed: {error}", file=sys.stderr)
        return 1
    print(f"\n{run.summary()}")
    if options.json is not None:
        options.json.write_text(run.to_json() + "\n")
    if options.plot is not None:
        plot(run, options.plot)
        print(f"plot: {options.plot}")
    for complaint in run.complaints():
        print(f"WRONG: {complaint}", file=sys.stderr)
    return 1 if run.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
