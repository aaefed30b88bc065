"""A Ray job: a fleet of servers, an FSDP2 trainer over several actors, a push after every step.

::

    python deploy/ray/job.py --model Qwen/Qwen3-0.6B --replicas 2 --trainers 2 -- --max-model-len 4096

What follows ``--`` goes to the servers. On a cluster: ``ray job submit``, see the README beside this file. The loss is
a stand-in: put your own rollouts and loss into `Trainer.train`.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import httpx
import ray
import torch
import torch.distributed as dist

from weightpush_client import PushReport
from weightpush_client.ray import ServerFleet

BATCH, LENGTH, LEARNING_RATE = 4, 64, 1e-5


class Trainer:
    """One rank of the trainer. All ranks make the same calls at the same time, as under ``torchrun``."""

    def __init__(self, rank: int, ranks: int, model: str, fleet: ServerFleet) -> None:
        self.rank, self.ranks, self.name, self.fleet = rank, ranks, model, fleet

    def address(self) -> str:
        """Return where the ranks can meet on this node."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Form the process group, shard the model over it, and make the pusher on every rank alike."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        kind = "cuda" if torch.cuda.is_available() else "cpu"
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=self.ranks)
        self.device = torch.device(kind)  # Ray shows each actor its own GPU only.
        self.model = AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.float32).to(self.device)
        mesh = init_device_mesh(kind, (self.ranks,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.pusher = self.fleet.pusher(process_group=dist.group.WORLD)

    def train(self, step: int) -> float:
        """Take one step; return its loss."""
        torch.manual_seed(step * self.ranks + self.rank)
        tokens = torch.randint(self.model.config.vocab_size, (BATCH, LENGTH), device=self.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def push(self, version: str) -> PushReport:
        """Push the weights as they are; rank 0 talks to the servers, all ranks return the report."""
        return self.pusher.push(self.model, weight_version=version)

    def leave(self) -> None:
        """Close the pusher and the process group."""
        self.pusher.close()
        dist.destroy_process_group()


def make_trainers(ranks: int, model: str, fleet: ServerFleet, **resources: Any) -> list[Any]:
    """Start the trainer's actors and have them join."""
    actor = ray.remote(**resources)(Trainer)
    trainers = [actor.remote(rank, ranks, model, fleet) for rank in range(ranks)]
    address = ray.get(trainers[0].address.remote())
    ray.get([trainer.join.remote(address) for trainer in trainers])
    return trainers


def versions(fleet: ServerFleet) -> list[str]:
    """Ask every server that is up for a few tokens; return the version that answered each."""
    body = {"prompt": "weights", "max_tokens": 4}
    answers = [httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=120) for url in fleet.urls()]
    return [answer.raise_for_status().headers["X-Weight-Version"] for answer in answers]


def train(trainers: list[Any], fleet: ServerFleet, steps: int) -> list[PushReport]:
    """Take ``steps`` steps, and push after each; return the reports."""
    reports: list[PushReport] = []
    for step in range(1, steps + 1):
        losses = ray.get([trainer.train.remote(step) for trainer in trainers])
        report = ray.get([trainer.push.remote(f"step-{step}") for trainer in trainers])[0]
        reports.append(report)
        print(f"step {step}: loss {sum(losses) / len(losses):.3f}, served {versions(fleet)}\n{report}", flush=True)
    return reports


def main() -> None:
    """Run the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name, or a path that all nodes see")
    parser.add_argument("--replicas", type=int, default=1, help="servers")
    parser.add_argument("--trainers", type=int, default=1, help="ranks of the trainer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("server_args", nargs="*", help="arguments of `weightpush serve`, after --")
    options = parser.parse_args()
    ray.init()  # The cluster of the job; without one, this machine.
    gpus = min(1.0, ray.cluster_resources().get("GPU", 0.0))
    with ServerFleet.launch(options.model, replicas=options.replicas, server_args=options.server_args) as fleet:
        print(f"{len(fleet)} servers are up: {', '.join(fleet.urls())}", flush=True)
        trainers = make_trainers(options.trainers, options.model, fleet, num_cpus=1, num_gpus=gpus)
        train(trainers, fleet, options.steps)
        ray.get([trainer.leave.remote() for trainer in trainers])


if __name__ == "__main__":
    main()
