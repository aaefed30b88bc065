"""What the matrix asks of vLLM's workers. Runs in the worker process, on every rank."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from support.engine import land, probe_layers, read
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.reload import Planner, finish_reload, start_reload
from weightpush_server.reload.fingerprint import reachable_tensors
from weightpush_server.reload.layout import find_layout


class MatrixExtension:
    """RPCs beside vLLM's own; every attribute carries the prefix ``matrix_``."""

    model_runner: Any
    vllm_config: Any
    device: Any

    def matrix_state(self) -> dict[str, str]:
        """Return a digest of every reachable tensor, layout included, and of every packed layer's answer to noise."""
        model = self.model_runner.get_model()
        tensors = {path: tensor.detach() for path, tensor in reachable_tensors(model)}
        return {name: _digest(tensor) for name, tensor in (*tensors.items(), *probe_layers(model))}

    def matrix_push(self, directory: str, planned: bool) -> dict[str, int]:
        """Push a checkpoint from its directory, by plan or by the model's loaders; return bytes landed in each way."""
        model, device = self.model_runner.get_model(), torch.device(self.device)
        tensors = read(Path(directory))
        layout = find_layout(model)
        assert layout is not None
        plan = None
        if planned:
            planner = Planner(model, layout, vllm_config=self.vllm_config, device=device)
            plan = planner.admit([TensorSpec.of(name, tensor) for name, tensor in tensors])
        session = start_reload(model, vllm_config=self.vllm_config, device=device, poison=True, plan=plan)
        for start in range(0, len(tensors), 7):
            land(session, tensors[start : start + 7])
        proof = finish_reload(session)
        assert proof.tensors == len(tensors)
        by_loader = sum(tensor.nbytes for name, tensor in tensors if plan is None or name in plan.via_loader)
        return {"bytes": proof.bytes, "by_loader": by_loader}

    def matrix_layerwise(self, directory: str) -> None:
        """Let vLLM reload by itself, layer by layer, from a checkpoint directory."""
        self.model_runner.reload_weights(weights_path=directory)


def _digest(tensor: torch.Tensor) -> str:
    facts = f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())} "
    if tensor.is_meta:
        return facts + "meta"
    raw = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return facts + hashlib.blake2b(raw, digest_size=8).hexdigest()
