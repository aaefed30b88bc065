"""TRL's own clients, unchanged, against a real server with --compat vllm. NCCL is replaced as for vLLM's engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from integration.conftest import PROMPTS, Checkpoints
from integration.test_vllm_trainer import Known, in_background, known, says, server, started
from support.gloo_plane import gloo_trainer
from support.raw import read_tensors
from support.server import ServerProcess, free_port

__all__ = ["known", "server", "started"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="TRL is not installed (it brings pyarrow and pandas): make test-trl installs it and runs this",
    ),
    pytest.mark.filterwarnings("ignore::UserWarning:trl"),
]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    """GRPOTrainer's client, connected."""
    from trl.generation import vllm_client

    with gloo_trainer((vllm_client, "open_trainer_endpoint")):
        client = vllm_client.VLLMClient(server.url, group_port=free_port(), connection_timeout=30)
        client.init_communicator(device="cuda")
        yield client
        client.communicator.close()
        client.close_communicator()


def test_a_whole_model_in_one_call(
    client: Any, server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    assert client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "raw_logprobs"
    # As TRL loads it where nothing else is said: in float32.
    client.update_model_params(AutoModelForCausalLM.from_pretrained(checkpoints.b, dtype="float32"))
    client.reset_prefix_cache()
    assert says(server, known["B"])
    found = client.generate([PROMPTS[0]], n=1, temperature=0.0, max_tokens=8)
    assert len(found["completion_ids"][0]) <= 8


def test_parameter_by_parameter(
    client: Any, server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    with client.weight_update():
        for name, tensor in read_tensors(checkpoints.b).items():
            client.update_named_param(name, tensor)
    client.reset_prefix_cache()
    assert says(server, known["B"])


def test_a_trainer_that_fails_in_the_middle_changes_nothing(
    client: Any, server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    def half() -> None:
        with client.weight_update():
            for name, tensor in list(read_tensors(checkpoints.b).items())[:7]:
                client.update_named_param(name, tensor)
            raise RuntimeError("out of memory")

    # TRL finishes the update all the same, and is told what is missing.
    with pytest.raises(Exception, match=r"Request failed: 422.*manifest_rejected"):
        half()
    assert says(server, known["A"])
    # A tensor by itself is an update of its own to TRL, and to us no checkpoint.
    with pytest.raises(Exception, match=r"Request failed: 422.*manifest_rejected"):
        client.update_named_param("model.norm.weight", torch.ones(64, dtype=torch.bfloat16))
    assert says(server, known["A"])
    client.update_model_params(AutoModelForCausalLM.from_pretrained(checkpoints.b, dtype="bfloat16"))
    assert says(server, known["B"])


def test_the_asynchronous_trainers_client(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    PartialState(cpu=True)  # Its logger wants one.
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from vllm.distributed.weight_transfer import packed_tensor

    from support.gloo_plane import GlooCommunicator

    client = VLLMClient(server.url)
    client.wait_for_server_ready()
    assert client.get_dtype() == "torch.bfloat16"
    address = {"master_address": "127.0.0.1", "master_port": free_port()}
    world_size = client.get_world_size() + 1
    init = {**address, "rank_offset": 1, "world_size": world_size, "packed": True}
    joining = in_background(lambda: client.init_weight_transfer_engine(init))
    group = GlooCommunicator("127.0.0.1", address["master_port"], rank=0, world_size=world_size, timeout_s=60)
    joining.join(60)
    tensors = read_tensors(checkpoints.b)
    info = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    answers: list[Any] = []
    asking = in_background(lambda: answers.append(server.complete(PROMPTS[0], max_tokens=150)))
    server.wait_running()
    client.pause()
    client.start_weight_update()
    posting = in_background(lambda: client.update_weights(info))
    with gloo_trainer():
        packed_tensor.packed_nccl_broadcast_producer(iter(tensors.items()), group, 0, lambda item: item[1])
    posting.join(60)
    client.finish_weight_update()
    client.resume()
    asking.join(60)
    assert answers[0].json()["usage"]["completion_tokens"] == 150
    assert says(server, known["B"])
    group.close()
