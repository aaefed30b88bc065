"""Weights from modules, mappings, pairs and directories, under the names and dtypes that a server expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightpush_client.align import agreed_manifest, align
from weightpush_client.names import RenamedSource, checkpoint_name
from weightpush_client.sources import WeightSource, open_source
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import ManifestAnswer


def spec(name: str, dtype: str = "float32", *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def expecting(*tensors: TensorSpec, optional: tuple[TensorSpec, ...] = ()) -> ManifestAnswer:
    return ManifestAnswer(tensors=list(tensors), optional=list(optional))


def sent_names(source: WeightSource, expected: ManifestAnswer) -> list[str]:
    return [item.sent.name for item in align(source, expected)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.ones(2))


# names


@pytest.mark.case("C34")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.a.w", "model.a.w"),
        ("_orig_mod.model.a.w", "model.a.w"),
        ("model._orig_mod.a._orig_mod.w", "model.a.w"),
        ("module.model.a.w", "model.a.w"),
        ("module.module.model.a.w", "model.a.w"),
        ("_orig_mod.module.model.a.w", "model.a.w"),
        ("module._orig_mod.model.a.w", "model.a.w"),
        ("_fsdp_wrapped_module.model._fsdp_wrapped_module.a._checkpoint_wrapped_module.w", "model.a.w"),
        # A wrapped submodule: known only because the server expects the rest.
        ("model.module.a.w", "model.a.w"),
        ("base_model.model.model.a.base_layer.w", "model.a.w"),
        # Components that only look like wrappers.
        ("model.my_module.a.w", "model.my_module.a.w"),
        ("model._orig_module.a.w", "model._orig_module.a.w"),
    ],
)
def test_wrappers_are_stripped(name: str, expected: str) -> None:
    assert checkpoint_name(name, {"model.a.w", "model.my_module.a.w"}) == expected


def test_a_name_that_the_server_knows_is_kept() -> None:
    assert checkpoint_name("module.a", {"module.a", "a"}) == "module.a"
    assert checkpoint_name("x.module.a", {"x.module.a", "x.a"}) == "x.module.a"
    assert checkpoint_name("module._orig_mod.x.module.a", {"x.module.a"}) == "x.module.a"


def test_an_unknown_name_loses_sure_wrappers_only() -> None:
    assert checkpoint_name("module._orig_mod.x.module.base_layer.a", set()) == "x.module.base_layer.a"
    assert checkpoint_name("module", set()) == "module"


@pytest.mark.case("C35", "C54")
def test_leftovers_of_an_adapter_are_sent_by_name() -> None:
    known = expecting(spec("head.weight", "float32", 2))
    tensors = {
        "base_model.model.head.original_module.weight": torch.zeros(2),
        "base_model.model.head.modules_to_save.default.weight": torch.ones(2),
        "base_model.model.head.lora_A.default.weight": torch.ones(2),
    }
    assert sent_names(open_source(tensors), known) == list(tensors)


# kinds of sources


def test_a_module_gives_parameters_and_persistent_buffers() -> None:
    names = [item.name for item in open_source(Tied()).specs()]
    assert names == [
        "kept",
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "head.weight",
    ]


def test_persistent_buffers_that_the_server_does_not_expect_are_offered_all_the_same() -> None:
    assert "norm.num_batches_tracked" in sent_names(
        open_source(Tied()), expecting(spec("embed.weight", "float32", 5, 3))
    )


@pytest.mark.parametrize("kind", ["dict", "pairs", "generator", "parameters"])
def test_order_is_that_of_the_source(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    items = dict(layers.named_parameters())
    weights: Any = {
        "dict": items,
        "pairs": list(items.items()),
        "generator": (pair for pair in items.items()),
        "parameters": layers.named_parameters(),
    }[kind]
    source = open_source(weights)
    assert [item.name for item in source.specs()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    backwards = [item.name for item in source.specs()][::-1]
    assert [name for name, _ in source.tensors(backwards)] == backwards
    assert all(torch.equal(tensor, items[name]) for name, tensor in source.tensors(backwards))


def test_gradients_do_not_matter() -> None:
    ((_, tensor),) = open_source({"a": torch.zeros(2, requires_grad=True)}).tensors(["a"])
    assert not tensor.requires_grad


def test_a_generator_that_refills_one_buffer_is_refused() -> None:
    buffer = torch.zeros(2)

    def refill() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield f"t{number}", buffer.fill_(number)

    with pytest.raises(WeightPushError, match="'t0' was overwritten after the source yielded it") as caught:
        open_source(refill())
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


def test_inference_tensors_are_taken() -> None:
    with torch.inference_mode():
        weights = {"a": torch.ones(2)}
    assert open_source(weights).specs() == [spec("a", "float32", 2)]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "names tensor 'a' twice"),
        ([torch.zeros(1)], "item 0 of the source is a Tensor, expected"),
        ([(1, torch.zeros(1))], "a name of type int"),
        ({"_extra_state": b"x"}, "'_extra_state' is a bytes, expected a tensor"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "'a' cannot be pushed: torch.complex64"),
        ({"a": torch.empty(1, device="meta")}, "'a' is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "'a' has layout torch.sparse_coo"),
        ({"": torch.zeros(1)}, "'' cannot be pushed: String should have at least 1 character"),
        ({"n" * 513: torch.zeros(1)}, "at most 512 characters"),
    ],
)
def test_what_cannot_be_pushed_is_named(weights: Any, message: str) -> None:
    with pytest.raises(WeightPushError, match=message) as caught:
        open_source(weights)
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


@pytest.mark.parametrize("weights", [3, None, torch.zeros(2), b"path"])
def test_other_kinds_are_a_type_error(weights: Any) -> None:
    with pytest.raises(TypeError, match="give a module, a state dict"):
        open_source(weights)


def test_dtensors_that_one_process_holds_whole_are_pushed(tmp_path: Path) -> None:
    # In a process of its own: it needs a default process group.
    program = f"""
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from weightpush_client.sources import open_source
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
whole = torch.arange(8.).view(4, 2)
tensor = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
source = open_source({{"plain": torch.zeros(1), "sharded": tensor, "again": tensor}})
assert source.ranks == 1
assert source.identity("sharded") == source.identity("again") != source.identity("plain")
((_, found),) = source.tensors(["sharded"])
print(type(found).__name__, torch.equal(found, whole), source.specs()[1])
((_, found),) = source.tensors(["sharded"], {{"sharded": torch.bfloat16}})
print(torch.equal(found, whole.to(torch.bfloat16)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        "Tensor True name='sharded' dtype='float32' shape=(4, 2)",
        "True",
    ], done.stdout + done.stderr


# names of the user's own


def renamed(weights: Any, names: Any) -> list[str]:
    return [item.name for item in RenamedSource(open_source(weights), names).specs()]


def test_a_mapping_renames_what_it_names_and_leaves_out_what_it_maps_to_none() -> None:
    weights = {"a": torch.zeros(1), "_orig_mod.b": torch.ones(1), "c": torch.zeros(2), "d": torch.zeros(3)}
    names = {"a": "model.a", "b": "model.b", "c": None}
    assert renamed(weights, names) == ["model.a", "model.b", "d"]
    source = RenamedSource(open_source(weights), names)
    assert [(name, tensor.tolist()) for name, tensor in source.tensors(["model.b", "d"])] == [
        ("model.b", [1.0]),
        ("d", [0.0, 0.0, 0.0]),
    ]


def test_a_function_gets_every_name_without_its_wrappers() -> None:
    weights = {"module.pretrained_model._orig_mod.a": torch.zeros(1), "module.v_head.weight": torch.zeros(1)}

    def names(name: str) -> str | None:
        return None if name.startswith("v_head.") else name.removeprefix("pretrained_model.")

    assert renamed(weights, names) == ["a"]


def test_tied_weights_stay_tied_under_other_names() -> None:
    expected = expecting(spec("model.embed", "float32", 5, 3))
    model = Tied()
    weights = {"embed": model.embed.weight, "head": model.head.weight}
    assert sent_names(RenamedSource(open_source(weights), {"embed": "model.embed"}), expected) == ["model.embed"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"a": "x", "z": "y"}, "names maps 'z', which is no tensor of what is pushed"),
        ({"a": "x", "b": "x"}, "names gave 'x' for both 'a' and 'b'"),
        ({"a": "b"}, "names gave 'b' for both 'a' and 'b'"),
        ({"a": 3}, "names gave 3 for 'a', expected the name of a tensor or None"),
        (lambda name: "", "names gave '' for 'a': String should have at least 1 character"),
    ],
)
def test_names_that_cannot_be_are_refused(names: Any, message: str) -> None:
    with pytest.raises(WeightPushError, match=message) as caught:
        renamed({"a": torch.zeros(1), "b": torch.zeros(1)}, names)
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


# directories


def write_sharded(directory: Path, **index: Any) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{number}": torch.full((3, 2), float(number)) for number in range(4)}
    shards = {
        "model-00001-of-00002.safetensors": ["layer.0", "layer.1"],
        "model-00002-of-00002.safetensors": ["layer.2", "layer.3"],
    }
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    content = {"metadata": {}, "weight_map": weight_map | index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    return tensors


def test_a_sharded_directory_is_read(tmp_path: Path) -> None:
    tensors = write_sharded(tmp_path)
    source = open_source(str(tmp_path))
    assert [item.name for item in source.specs()] == list(tensors)
    shuffled = ["layer.3", "layer.0", "layer.2", "layer.1"]
    assert [name for name, tensor in source.tensors(shuffled) if torch.equal(tensor, tensors[name])] == shuffled


def test_a_single_file_with_every_dtype_is_read(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.ones(2, 2, dtype=torch.bfloat16),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "int": torch.arange(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"another layout, not ours")
    source = open_source(tmp_path)
    assert {item.name: (item.dtype, item.shape) for item in source.specs()} == {
        "bf16": ("bfloat16", (2, 2)),
        "fp8": ("float8_e4m3fn", (3,)),
        "bool": ("bool", (2,)),
        "scalar": ("float32", ()),
        "empty": ("float32", (0, 4)),
        "int": ("int64", (3,)),
    }
    for name, tensor in source.tensors(list(tensors)):
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)) if tensor.dim() else tensor == 3


def test_symbolic_links_are_followed_as_hub_caches_need(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    os.symlink("../blobs/0123", tmp_path / "snapshot" / "model.safetensors")
    assert open_source(tmp_path / "snapshot").specs() == [spec("a", "float32", 2)]


def _truncate(directory: Path) -> None:
    file = directory / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _without_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model-00001-of-00002.safetensors").unlink()


def _empty(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"pickle")


def _twice(directory: Path) -> None:
    save_file({"layer.0": torch.ones(1)}, directory / "model-00002-of-00002.safetensors")


@pytest.mark.case("C44")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), "lacks model-00002-of-00002.safetensors"),
        (_truncate, "cannot read .*model-00002-of-00002.safetensors"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{"), "cannot read the index"),
        (lambda d: (d / "model.safetensors.index.json").write_bytes(b"\xff\xfe"), "cannot read the index"),
        (lambda d: (d / "model.safetensors.index.json").write_text("[" * 100_000), "cannot read the index"),
        (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "has no weight_map"),
        (lambda d: write_sharded(d, x="../x.safetensors"), r"expected the name of a file beside it"),
        (lambda d: write_sharded(d, x="/etc/passwd"), r"expected the name of a file beside it"),
        (lambda d: write_sharded(d, x="model-00001-of-00002.safetensors"), "puts tensor 'x' into .* which lacks it"),
        (_without_index, "lacks model-00001-of-00002.safetensors"),
        (_empty, "holds no .safetensors file"),
        (_twice, "tensor 'layer.0' lies in two files"),
    ],
)
def test_a_damaged_directory_is_refused_by_name(tmp_path: Path, damage: Any, message: str) -> None:
    write_sharded(tmp_path)
    damage(tmp_path)
    with pytest.raises(WeightPushError, match=message) as caught:
        open_source(tmp_path)
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightPushError, match="is not a directory"):
        open_source(tmp_path / "nowhere")


def test_a_file_that_changes_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    source = open_source(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    read = source.tensors(["layer.0", "layer.2"])
    next(read)
    with pytest.raises(WeightPushError, match=r"cannot read tensor 'layer\.2' from .*00002-of-00002"):
        next(read)


# alignment


@pytest.mark.case("C12", "C13", "C66")
@pytest.mark.parametrize("optional", [True, False])
def test_a_tied_alias_that_the_server_does_not_ask_for_is_left_out(optional: bool) -> None:
    embed, head = spec("embed.weight", "float32", 5, 3), spec("head.weight", "float32", 5, 3)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    expected = expecting(embed, optional=(head,) if optional else ())
    assert sent_names(open_source(model), expected) == ["embed.weight"]
    # The alias that is asked for travels, whichever comes first.
    assert sent_names(open_source(model), expecting(head)) == ["head.weight"]
    assert sent_names(open_source(model), expecting(embed, head)) == ["embed.weight", "head.weight"]
    # Neither is known: both are offered, so that the server names them.
    assert sent_names(open_source(model), expecting(spec("x", "float32", 1))) == ["embed.weight", "head.weight"]


def test_an_optional_tensor_with_bytes_of_its_own_travels() -> None:
    weights = {"embed": torch.zeros(2), "head": torch.ones(2)}
    expected = expecting(spec("embed", "float32", 2), optional=(spec("head", "float32", 2),))
    assert sent_names(open_source(weights), expected) == ["embed", "head"]


def test_views_of_one_storage_are_not_taken_for_one_tensor() -> None:
    whole = torch.arange(8.0)
    weights = {"a": whole[:4], "b": whole[4:], "c": whole[:4].view(2, 2), "t": torch.zeros(0), "u": torch.zeros(0)}
    known = expecting(spec("a", "float32", 4))
    assert sent_names(open_source(weights), known) == ["a", "b", "c", "t", "u"]


def test_two_names_that_become_one_are_an_error_unless_tied() -> None:
    tensor = torch.zeros(2)
    known = expecting(spec("a", "float32", 2))
    assert sent_names(open_source({"_orig_mod.a": tensor, "a": tensor}), known) == ["a"]
    with pytest.raises(WeightPushError, match=r"both 'a' without their wrappers: '_orig_mod\.a' and 'a'") as caught:
        align(open_source({"_orig_mod.a": tensor, "a": torch.zeros(2)}), known)
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


@pytest.mark.case("C27", "C92")
@pytest.mark.parametrize(
    ("held", "wanted", "sent"),
    [
        (torch.float32, "bfloat16", "bfloat16"),
        (torch.float16, "bfloat16", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float64, "float16", "float16"),
        (torch.bfloat16, "float8_e4m3fn", "bfloat16"),
        (torch.float8_e4m3fn, "bfloat16", "float8_e4m3fn"),
        (torch.int64, "int32", "int64"),
        (torch.float32, "int8", "float32"),
        (torch.bool, "uint8", "bool"),
    ],
)
def test_only_plain_floating_dtypes_are_cast(held: torch.dtype, wanted: str, sent: str) -> None:
    (item,) = align(open_source({"a": torch.zeros(2).to(held)}), expecting(spec("a", wanted, 2)))
    assert (item.held.torch_dtype, item.sent.dtype) == (held, sent)


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(WeightPushError, match="the source is empty"):
        align(open_source({}), expecting(spec("a", "float32", 2)))


def test_servers_that_expect_different_checkpoints_are_named() -> None:
    one = expecting(spec("a", "float32", 2), spec("b", "float32", 2))
    other = expecting(spec("b", "float32", 2), spec("a", "float32", 2))
    assert agreed_manifest([("http://one", one), ("http://other", other)]) is one
    for different, message in (
        (
            expecting(spec("a", "float32", 2)),
            r"'b': http://one expects float32 \[2\], http://two expects no such tensor",
        ),
        (
            expecting(*one.tensors, spec("c", "int8", 1)),
            r"'c': http://one expects no such tensor, http://two expects int8",
        ),
        (expecting(spec("a", "bfloat16", 2), spec("b", "float32", 2)), r"'a': .* http://two expects bfloat16 \[2\]"),
        (expecting(*one.tensors, optional=(spec("h", "int8", 1),)), "'h'"),
    ):
        with pytest.raises(WeightPushError, match=message) as caught:
            agreed_manifest([("http://one", one), ("http://other", other), ("http://two", different)])
        assert caught.value.code is ErrorCode.MANIFEST_REJECTED
