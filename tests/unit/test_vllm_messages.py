"""What trainers of vLLM's kind send: bodies, chunks, and the id in their store. Judged without a server."""

from __future__ import annotations

import base64
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.compat.messages import FinishRequest, InitInfo, PauseQuery, UpdateRequest
from weightpush_server.compat.nccl import find_unique_id, open_communicator
from weightpush_server.compat.packing import cut_chunks

ID = bytes(range(128))


def test_what_vllm_sends_at_the_rendezvous_is_understood() -> None:
    by_address = NCCLWeightTransferInitInfo(
        master_address="10.0.0.1", master_port=51216, rank_offset=1, world_size=3, packed=True
    )
    init = InitInfo.model_validate(worker_init_payload(by_address))
    assert (init.master_address, init.master_port, init.world_size, init.unique_id) == ("10.0.0.1", 51216, 3, None)
    assert (init.packed, init.packed_buffer_size_bytes, init.packed_num_buffers) == (True, 2**30, 2)
    text = base64.b64encode(ID).decode()
    by_id = NCCLWeightTransferInitInfo(nccl_unique_id_b64=text, rank_offset=1, world_size=2)
    init = InitInfo.model_validate({**worker_init_payload(by_id), "a_later_field": 1})
    assert (init.unique_id, init.packed) == (ID, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"master_port": None},
        {"master_address": None},
        {"nccl_unique_id_b64": base64.b64encode(ID).decode()},
        {"master_address": None, "master_port": None},
        {"master_address": None, "master_port": None, "nccl_unique_id_b64": base64.b64encode(ID[1:]).decode()},
        {"master_address": None, "master_port": None, "nccl_unique_id_b64": "-_" * 86},
        {"master_port": 65536},
        {"master_address": "a host"},
        {"rank_offset": 0},
        {"world_size": 1},
        {"packed_buffer_size_bytes": 0},
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    good = {"master_address": "trainer", "master_port": 1234, "rank_offset": 1, "world_size": 2}
    InitInfo.model_validate(good)
    with pytest.raises(ValidationError) as refused:
        InitInfo.model_validate({**good, **changes})
    assert "AAEC" not in str(refused.value)  # The id admits to the group.


def update(**changes: Any) -> dict[str, Any]:
    info = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
    return {**info, **changes}


def test_an_update_names_its_tensors() -> None:
    wanted = (
        TensorSpec(name="a", dtype="bfloat16", shape=(2, 3)),
        TensorSpec(name="b", dtype="float32", shape=()),
    )
    assert UpdateRequest.model_validate({"update_info": update()}).info.specs == wanted
    assert UpdateRequest.model_validate({"update_info": [update(packed=True)] * 3}).info.specs == wanted
    empty = update(names=[], dtype_names=[], shapes=[])
    assert UpdateRequest.model_validate({"update_info": empty}).info.specs == ()


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (update(names=["a"]), "differ in length"),
        (update(dtype_names=["bfloat16", "complex64"]), "unknown dtype"),
        (update(shapes=[[2, -3], []]), "greater than or equal to 0"),
        (update(ipc_handles_pickled="gASVAAAA"), "CUDA IPC"),
        ({"names": ["a"]}, "Field required"),
        ([update(), update(names=["a", "c"])], "different tensors"),
        ([], "at least 1 item"),
    ],
)
def test_an_update_that_cannot_be_received_is_refused(info: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        UpdateRequest.model_validate({"update_info": info})


def test_versions_and_modes() -> None:
    assert FinishRequest.model_validate({}).weight_version is None
    assert PauseQuery.model_validate({"mode": "keep", "clear_cache": "true"}).mode == "keep"
    for wrong in ("step 17", "a,b", "", "é", "x" * 129):
        with pytest.raises(ValidationError):
            FinishRequest.model_validate({"weight_version": wrong})


def vllm_packs(pairs: Any, limit: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says so when one tensor fills a chunk.
        return pack_tensors(pairs, lambda item: item[1], limit)


dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])
tensors = st.lists(st.tuples(dtypes, st.integers(0, 40)), min_size=1, max_size=20)


@settings(deadline=None, max_examples=200)
@given(sizes=tensors, limit=st.integers(1, 200))
def test_chunks_are_cut_where_vllm_cuts_them(sizes: list[tuple[torch.dtype, int]], limit: int) -> None:
    named = [(f"t{number}", torch.ones(size, dtype=dtype)) for number, (dtype, size) in enumerate(sizes)]
    pairs, theirs = iter(named), []
    while (packed := vllm_packs(pairs, limit)) is not None:
        theirs.append((packed.names, packed.tensor_sizes, packed.packed_tensor.numel()))
    ours = list(cut_chunks([TensorSpec.of(name, tensor) for name, tensor in named], packed_bytes=limit))
    assert [
        ([spec.name for spec, _ in chunk.entries], [spec.nbytes for spec, _ in chunk.entries], chunk.nbytes)
        for chunk in ours
    ] == theirs
    for chunk in ours:
        ends = [offset + spec.nbytes for spec, offset in chunk.entries]
        assert [offset for _, offset in chunk.entries] == [0, *ends[:-1]]
    alone = list(cut_chunks([spec for chunk in ours for spec, _ in chunk.entries], packed_bytes=None))
    assert [(len(chunk.entries), chunk.nbytes) for chunk in alone] == [
        (1, tensor.numel() * tensor.element_size()) for _, tensor in named
    ]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_id_in_the_trainers_store_is_found(protocol: int) -> None:
    theirs = ncclUniqueId()
    theirs.internal[:] = [byte - 256 if byte > 127 else byte for byte in reversed(ID)]
    text = pickle.dumps(theirs, protocol)
    if protocol < 3:  # Where bytes have no form of their own. vLLM writes what the interpreter writes by default.
        with pytest.raises(WeightPushError):
            find_unique_id(text)
    else:
        assert find_unique_id(text) == ID[::-1]


@pytest.mark.case("C26")
def test_what_lies_in_the_store_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "marker").mkdir, ()

    assert find_unique_id(pickle.dumps((Evil(), ID))) == ID
    for text in (
        pickle.dumps(Evil()),
        pickle.dumps([ID, ID[::-1]]),
        b"",
        b"\x80\x05garbage",
        ID,
        pickle.dumps(ID * 40),
    ):
        with pytest.raises(WeightPushError) as refused:
            find_unique_id(text)
        assert refused.value.code is ErrorCode.RENDEZVOUS_FAILED
    assert not (tmp_path / "marker").exists()


def test_a_server_without_gpus_says_so() -> None:
    init = InitInfo(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2)
    with pytest.raises(WeightPushError, match="send over NCCL") as refused:
        open_communicator(init, rank=1, device=torch.device("cpu"), timeout_s=1)
    assert refused.value.code is ErrorCode.TRANSPORT_UNAVAILABLE
