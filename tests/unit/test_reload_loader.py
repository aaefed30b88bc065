"""The loader's wrapping of another format, and reading a checkpoint's headers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from weightpush_protocol.manifest import TensorSpec
from weightpush_server.loader import (
    INNER_FORMAT_KEY,
    LOAD_FORMAT,
    WeightpushLoader,
    _Checkpoint,
    _listening,
    read_checkpoint_specs,
    register_loader,
)


def test_the_first_registration_counts_and_later_ones_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    register_loader()
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    try:
        register_loader()
    finally:
        vllm_logger.removeHandler(caplog.handler)
    assert caplog.records == []
    assert type(get_model_loader(LoadConfig(load_format=LOAD_FORMAT))) is WeightpushLoader


def test_the_inner_loader_gets_its_own_settings_and_ours_stay() -> None:
    extra = {INNER_FORMAT_KEY: "safetensors", "enable_multithread_load": True, "num_threads": 2}
    config = LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config=dict(extra))
    loader = WeightpushLoader(config)
    inner = loader._inner
    assert type(inner) is DefaultModelLoader
    assert inner.load_config.load_format == "safetensors"
    assert inner.load_config.model_loader_extra_config == {"enable_multithread_load": True, "num_threads": 2}
    assert config.load_format == LOAD_FORMAT
    assert config.model_loader_extra_config == extra
    assert loader.get_all_weights == inner.get_all_weights


def test_what_the_inner_loader_lacks_is_lacking() -> None:
    config = LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config={INNER_FORMAT_KEY: "dummy"})
    loader = WeightpushLoader(config)
    assert type(loader._inner) is DummyModelLoader
    assert not hasattr(loader, "get_all_weights")


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (LOAD_FORMAT, "name one that reads a checkpoint"),
        ("sharded_state", "name one that reads a checkpoint"),
        ("tensorizer", "processes weights while loading"),
        ("no_such_format", "not supported"),
    ],
)
def test_formats_without_a_checkpoint_layout_are_refused_at_start(inner: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WeightpushLoader(LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config={INNER_FORMAT_KEY: inner}))


def test_headers_of_all_files_are_read(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "model-00001.safetensors", {"format": "pt"})
    save_file({"a": torch.zeros((), dtype=torch.float32)}, tmp_path / "model-00002.safetensors")
    assert read_checkpoint_specs(tmp_path) == (
        TensorSpec(name="b", dtype="bfloat16", shape=(2, 3)),
        TensorSpec(name="a", dtype="float32", shape=()),
    )


def test_no_directory_and_no_file_mean_unknown(tmp_path: Path) -> None:
    assert read_checkpoint_specs(tmp_path) is None
    assert read_checkpoint_specs(tmp_path / "organisation" / "name") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no safetensors file"),
        (b"\x00" * 7, "no safetensors file"),
        (b"\xff" * 64, "no safetensors file"),
        ((40).to_bytes(8, "little") + b'{"a": ', "damaged"),
        (
            (60).to_bytes(8, "little") + json.dumps({"a": {"dtype": "X9", "shape": []}}).encode().ljust(60),
            "'a' has a dtype that cannot be pushed",
        ),
    ],
)
def test_a_damaged_file_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors.*{reason}"):
        read_checkpoint_specs(tmp_path)


class Model(nn.Module):
    """Loads what it is given, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def test_listening_ends_with_the_loading() -> None:
    model, heard = Model(), _Checkpoint()
    with pytest.raises(RuntimeError, match="must match the size"), _listening(model, heard):
        model.load_weights([("weight", torch.ones(3))])
    model.load_weights([("other", torch.ones(2))])
    assert "load_weights" not in model.__dict__
    assert heard.specs() == (TensorSpec(name="weight", dtype="float32", shape=(3,)),)


def test_a_dtype_that_cannot_travel_makes_the_checkpoint_unknown(caplog: pytest.LogCaptureFixture) -> None:
    model, heard = Model(), _Checkpoint()
    with _listening(model, heard):
        model.load_weights([("a", torch.ones(2)), ("b", torch.ones(2, dtype=torch.complex64))])
    assert heard.specs() is None
    assert "'b'" in caplog.text
