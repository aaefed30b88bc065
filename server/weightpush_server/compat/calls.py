"""What the routes stand on, in one API process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightpush_server.compat.holding import Holding
from weightpush_server.compat.rounds import VllmRounds
from weightpush_server.engine import Engine
from weightpush_server.lifecycle import UpdateLifecycle
from weightpush_server.publishing import Publisher
from weightpush_server.shared_state import SharedState

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class VllmCalls:
    """Found by the routes at ``app.state.weightpush.vllm_calls``."""

    def __init__(
        self, shared: SharedState, engine: Engine, lifecycle: UpdateLifecycle, vllm_config: VllmConfig
    ) -> None:
        self.engine = engine
        self.vllm_config = vllm_config
        self.rounds = VllmRounds(shared, engine, lifecycle, Publisher(shared, engine, lifecycle))
        self.holding = Holding(shared, engine)
        self._shared = shared

    @property
    def weight_version(self) -> str:
        """Version of the weights that were committed last."""
        return self._shared.control().weight_version

    def world_size(self, *, include_dp: bool) -> int:
        """Return the number of workers of this server, or of one of its data-parallel engines."""
        return self._shared.workers if include_dp else self.vllm_config.parallel_config.world_size


def server_facts(config: VllmConfig) -> dict[str, Any]:
    """Return those settings of vLLM that trainers look at; it has others that are nobody's business."""
    model, parallel, lora = config.model_config, config.parallel_config, config.lora_config
    return {
        "weight_transfer_config": {"backend": "nccl"},
        "model_config": {
            "model": model.model,
            "dtype": str(model.dtype),
            "max_model_len": model.max_model_len,
            "max_logprobs": model.max_logprobs,
            "logprobs_mode": model.logprobs_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
        },
        "lora_config": None
        if lora is None
        else {"max_lora_rank": lora.max_lora_rank, "max_loras": lora.max_loras, "max_cpu_loras": lora.max_cpu_loras},
    }
