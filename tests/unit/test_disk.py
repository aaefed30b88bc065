"""A checkpoint on disk: every refusal by name before anything is written, and every change under our hands noticed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from weightpush_protocol.checkpoint_files import CheckpointFilesError, choose_files
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server import disk
from weightpush_server.disk import DiskCheckpoint, resolve_directory
from weightpush_server.disk_reload import _Files
from weightpush_server.stored import OpenCheckpoint

SHARDS = {
    "model-00001-of-00002.safetensors": ["layer.0", "layer.1"],
    "model-00002-of-00002.safetensors": ["layer.2", "layer.3"],
}
FIRST, SECOND = SHARDS
INDEX = "model.safetensors.index.json"


def tensors(version: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((3, 5), number + version, dtype=torch.bfloat16) for number in range(4)}


def write(directory: Path, version: float = 0.0, **index: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file, names in SHARDS.items():
        save_file({name: tensors(version)[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in SHARDS.items() for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map | index}))
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return (tmp_path / "root").resolve()


@pytest.fixture
def saved(root: Path) -> Path:
    return write(root / "step-1")


def read(disk: DiskCheckpoint) -> dict[str, torch.Tensor]:
    source = OpenCheckpoint(disk.stored)
    found = {tensor.spec.name: source.read(tensor) for tensor in disk.stored.tensors}
    source.close()
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def refusal(make: Callable[[], object]) -> WeightPushError:
    """Return what is raised; no descriptor is left open by it."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightPushError) as caught:
        make()
    assert len(os.listdir("/proc/self/fd")) == before
    return caught.value


# paths


def test_without_a_root_nothing_is_loaded(saved: Path) -> None:
    error = refusal(lambda: resolve_directory(str(saved), []))
    assert error.code is ErrorCode.DISK_RELOAD_OFF
    assert "--reload-root" in error.message


@pytest.mark.case("C85")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{root}/../../etc", "goes up"),
        ("../../etc", "not absolute"),
        ("/etc", "does not lead below"),
        ("/", "does not lead below"),
        ("{root}-other", "does not lead below"),
        ("/nowhere/at/all", "does not lead below"),
        ("file://{root}/step-1", "not absolute"),
        ("http://127.0.0.1:1/step-1", "not absolute"),
        ("Qwen/Qwen3-0.6B", "not absolute"),
        ("{root}/step-1\0", "control characters"),
        ("{root}/step-1\n", "control characters"),
        ("{root}/missing", "is no directory"),
        ("{root}/step-1/model-00001-of-00002.safetensors", "is no directory"),
        ("{root}/out", "does not lead below"),
        ("{root}/out/inside", "does not lead below"),
        ("{root}/loop", "is no directory"),
        ("{root}/" + "x" * 3000, "is no directory"),
        ("~/step-1", "not absolute"),
        ("{root}/\udcff", "is no directory"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(root: Path, saved: Path, path: str, why: str) -> None:
    outside = write(root.parent / "root-other" / "inside").parent
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    error = refusal(lambda: resolve_directory(path.replace("{root}", str(root)), [root]))
    assert error.code is ErrorCode.PATH_REFUSED
    assert why in error.message
    assert len(error.message) < 600 + len(str(root))


def test_a_path_outside_is_refused_alike_whether_it_exists_or_not(root: Path) -> None:
    texts = [
        refusal(lambda path=path: resolve_directory(path, [root])).message.replace(path, "PATH")  # type: ignore[misc]  # a lambda with a default
        for path in ("/etc", "/etcetera", "/root/.ssh/id_rsa")
    ]
    assert len(set(texts)) == 1


def test_links_that_stay_inside_are_followed(root: Path, saved: Path) -> None:
    (root / "latest").symlink_to("step-1")
    (root.parent / "alias").symlink_to(root)
    for path in (root / "latest", root.parent / "alias" / "step-1", f"{root}//./step-1/"):
        assert resolve_directory(str(path), [Path("/nowhere"), root]) == saved


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_whatever_the_path_it_is_refused_or_below_a_root(text: str) -> None:
    roots = [Path("/usr/lib"), Path("/usr/share")]
    for path in (text, f"/usr/lib/{text}", f"/usr/{text}"):
        try:
            found = resolve_directory(path, roots)
        except WeightPushError as error:
            refused = error.code
        else:
            refused = None
            assert any(found.is_relative_to(root) for root in roots)
        assert refused in (None, ErrorCode.PATH_REFUSED)


# files


def test_a_checkpoint_is_found_where_it_lies(root: Path, saved: Path) -> None:
    opened = DiskCheckpoint(saved, [root])
    assert same(read(opened), tensors())
    assert [tensor.spec.name for tensor in opened.stored.tensors] == list(tensors())
    opened.check_unchanged()
    opened.close()
    opened.close()


def test_a_hub_cache_has_links_to_blobs(root: Path, saved: Path) -> None:
    (root / "blobs").mkdir()
    for number, file in enumerate([*SHARDS, INDEX]):
        (saved / file).rename(root / "blobs" / str(number))
        (saved / file).symlink_to(f"../blobs/{number}")
    opened = DiskCheckpoint(saved, [root])
    assert same(read(opened), tensors())
    opened.close()


def truncate(directory: Path, file: str = SECOND, by: int = 8) -> None:
    (directory / file).write_bytes((directory / file).read_bytes()[:-by])


def set_header(directory: Path, change: Callable[[dict[str, Any]], None], file: str = SECOND) -> None:
    data = (directory / file).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def without_index(directory: Path, *gone: str) -> None:
    for file in (INDEX, *gone):
        (directory / file).unlink()


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def stranger(directory: Path) -> None:
    save_file({"layer.9": torch.ones(1)}, directory / "model-00003-of-00003.safetensors")


#: What is wrong -> (how it came about, what the message must say)
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda d: (d / SECOND).unlink(), f"lacks {SECOND}, which {INDEX} names"),
    "missing shard without index": (lambda d: without_index(d, FIRST), f"lacks {FIRST}"),
    "empty directory": (empty, "holds no .safetensors file"),
    "pickles": (lambda d: (empty(d), (d / "pytorch_model.bin").write_bytes(b"\x80")), "holds no .safetensors file"),
    "truncated shard": (truncate, f"{SECOND} is damaged: .*the data should end"),
    "overlong shard": (lambda d: (d / SECOND).open("ab").write(b"x"), f"{SECOND} is damaged: .*the data should end"),
    "empty shard": (lambda d: (d / SECOND).write_bytes(b""), f"{SECOND} is truncated or no safetensors"),
    "cut in the header": (lambda d: truncate(d, by=150), f"{SECOND} is truncated or no safetensors"),
    "not safetensors": (lambda d: (d / SECOND).write_text("root:secret:0:0:" * 20), "no safetensors file"),
    "tiny header": (lambda d: (d / SECOND).write_bytes(b"\0" * 20), f"{SECOND} is damaged"),
    "header is no JSON": (lambda d: (d / SECOND).write_bytes((2).to_bytes(8, "little") + b"{x"), "is damaged"),
    "dtype that cannot travel": (
        lambda d: set_header(d, lambda h: h["layer.3"].update(dtype="F4")),
        f"{SECOND} is damaged: tensor 'layer.3' has dtype 'F4'",
    ),
    "overlap": (
        lambda d: set_header(d, lambda h: h["layer.3"].update(data_offsets=h["layer.2"]["data_offsets"])),
        "overlaps the one before",
    ),
    "wrong size": (lambda d: set_header(d, lambda h: h["layer.3"].update(shape=[3, 4])), "takes 24 bytes, given 30"),
    "name in two shards": (
        lambda d: save_file(tensors(), d / SECOND),
        f"tensor 'layer.0' lies in two files: {FIRST} and {SECOND}",
    ),
    "shard not in index": (stranger, f"holds model-00003-of-00003.safetensors, which {INDEX} does not name"),
    "tensor not in index": (
        lambda d: save_file({**{n: tensors()[n] for n in SHARDS[SECOND]}, "extra": torch.ones(1)}, d / SECOND),
        "tensor 'extra' lies in .*, but is not in",
    ),
    "tensor in another shard": (lambda d: write(d, **{"layer.0": SECOND}), f"puts tensor 'layer.0' into {SECOND}"),
    "index is no JSON": (lambda d: (d / INDEX).write_text("root:secret:0"), "it is not JSON at byte 0"),
    "index is nested": (lambda d: (d / INDEX).write_text("[" * 100_000), "it is not JSON"),
    "index without map": (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
    "index points up": (lambda d: write(d, x="../x.safetensors"), "expected the name of a file beside it"),
    "index points away": (lambda d: write(d, x="/etc/passwd"), "expected the name of a file beside it"),
    "shard is a folder": (lambda d: ((d / SECOND).unlink(), (d / SECOND).mkdir()), f"lacks {SECOND}"),
    "shard is a pipe": (lambda d: ((d / SECOND).unlink(), os.mkfifo(d / SECOND)), f"lacks {SECOND}"),
    "no tensors": (lambda d: (empty(d), save_file({}, d / "model.safetensors")), "holds no tensor"),
}


@pytest.mark.case("C44")
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(root: Path, saved: Path, kind: str) -> None:
    damage, message = DAMAGES[kind]
    damage(saved)
    error = refusal(lambda: DiskCheckpoint(saved, [root]))
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    with pytest.raises(WeightPushError, match=message):
        raise error
    assert "secret" not in json.dumps(error.body().model_dump(mode="json"))


@pytest.mark.case("C85")
@pytest.mark.parametrize("file", [SECOND, INDEX])
def test_a_file_that_leads_out_is_not_opened(root: Path, saved: Path, file: str) -> None:
    (saved / file).rename(root.parent / "outside")
    (saved / file).symlink_to(root.parent / "outside")
    error = refusal(lambda: DiskCheckpoint(saved, [root]))
    assert (error.code, file in error.message) == (ErrorCode.PATH_REFUSED, True)
    assert "leads out" in error.message
    (saved / file).unlink()
    (saved / file).symlink_to("/etc/passwd")
    assert "leads out" in refusal(lambda: DiskCheckpoint(saved, [root])).message
    dangling = saved / file
    dangling.unlink()
    dangling.symlink_to("nowhere")
    assert refusal(lambda: DiskCheckpoint(saved, [root])).code is ErrorCode.CHECKPOINT_DAMAGED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bytes")).resolve()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_one_changed_byte_of_a_header_never_breaks_more_than_the_checkpoint(folder: Path, data: st.DataObject) -> None:
    """Refused by name, or still a whole description of the same bytes."""
    whole = (folder / SECOND).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    at, value = data.draw(st.integers(0, header - 1)), data.draw(st.integers(0, 255))
    changed = bytearray(whole)
    changed[at] = value
    refused: WeightPushError | None = None
    try:
        (folder / SECOND).write_bytes(changed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "_QUIET_NS", 0)  # Nobody else writes here.
            opened = DiskCheckpoint(folder, [folder])
        assert sum(tensor.spec.nbytes for tensor in opened.stored.tensors) == 4 * 30
        opened.close()
    except WeightPushError as error:
        refused = error
    finally:
        (folder / SECOND).write_bytes(whole)
    assert refused is None or (refused.code is ErrorCode.CHECKPOINT_DAMAGED and SECOND in refused.message)


@given(
    st.lists(st.sampled_from(["a-00001-of-00002", "a-00002-of-00002", "a-1-of-99999999999", "model", "b"]), max_size=5)
)
@settings(deadline=None)
def test_choosing_files_is_total(stems: list[str]) -> None:
    present = {f"{stem}.safetensors" for stem in stems}
    try:
        chosen = choose_files(present, lambda _: b"")
    except CheckpointFilesError as error:
        said = str(error)
    else:
        said = ""
        assert set(chosen.files) <= present
        assert chosen.files
    assert len(said) < 1000


# changes


def overwrite_in_place(directory: Path) -> None:
    """Same name, same size, same time."""
    before = (directory / SECOND).stat()
    save_file({name: tensors(9.0)[name] for name in SHARDS[SECOND]}, directory / "new")
    data = (directory / "new").read_bytes()
    (directory / "new").unlink()
    assert len(data) == before.st_size
    with (directory / SECOND).open("r+b") as file:
        file.write(data)
    os.utime(directory / SECOND, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(directory: Path) -> None:
    before = (directory / SECOND).stat()
    save_file({name: tensors(9.0)[name] for name in SHARDS[SECOND]}, directory / "new")
    os.utime(directory / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (directory / "new").rename(directory / SECOND)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "overwritten in place": (overwrite_in_place, f"{SECOND} was written to"),
    "replaced": (replace, f"{SECOND} was "),
    "removed": (lambda d: (d / SECOND).unlink(), f"{SECOND} was "),
    "truncated": (truncate, f"{SECOND} was written to"),
    "index written": (lambda d: write(d), "was written to"),
    "shard added": (stranger, "model-00003-of-00003.safetensors came or went"),
}


@pytest.mark.case("C77", "C104")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_under_our_hands_is_noticed(root: Path, saved: Path, kind: str) -> None:
    change, message = CHANGES[kind]
    opened = DiskCheckpoint(saved, [root])
    opened.check_unchanged()
    change(saved)
    with pytest.raises(WeightPushError, match=message) as caught:
        opened.check_unchanged()
    assert caught.value.code is ErrorCode.FILES_CHANGED
    opened.close()


@pytest.mark.case("C104")
def test_files_must_have_been_left_alone_for_a_moment(root: Path, saved: Path) -> None:
    """Where the clock of a file system is coarse, a second write within a tick looks as old as the first."""
    for file in (FIRST, SECOND, INDEX):
        (saved / file).touch()
        opened = DiskCheckpoint(saved, [root])
        assert time.time_ns() - (saved / file).stat().st_ctime_ns >= 100_000_000
        opened.close()


@pytest.mark.case("C77")
@pytest.mark.parametrize("kind", ["overwritten in place", "replaced"])
def test_the_next_load_follows_the_file(root: Path, saved: Path, kind: str) -> None:
    first = DiskCheckpoint(saved, [root])
    first.close()
    CHANGES[kind][0](saved)
    second = DiskCheckpoint(saved, [root])
    wanted = {**tensors(), **{name: tensors(9.0)[name] for name in SHARDS[SECOND]}}
    assert same(read(second), wanted)
    second.close()


@pytest.mark.case("C77")
def test_a_link_that_is_switched_leads_to_one_checkpoint_or_the_other(root: Path, saved: Path) -> None:
    other = write(root / "step-2", version=9.0)
    link = root / "latest"
    link.symlink_to(saved)
    opened = DiskCheckpoint(resolve_directory(str(link), [root]), [root])
    (root / "next").symlink_to(other)
    (root / "next").rename(link)
    assert same(read(opened), tensors())
    opened.check_unchanged()
    opened.close()
    opened = DiskCheckpoint(resolve_directory(str(link), [root]), [root])
    assert same(read(opened), tensors(9.0))
    opened.close()


# the copy in memory


@pytest.fixture
def files(root: Path, saved: Path) -> Iterator[_Files]:
    made = _Files(saved, [root], {})
    yield made
    made.close()


def test_a_copy_outlives_its_files(files: _Files, saved: Path) -> None:
    files.open()
    stored = files.copy()
    shutil.rmtree(saved)
    files.check()
    assert all(file.in_memory for file in stored.files)
    source = OpenCheckpoint(stored)
    assert same({tensor.spec.name: source.read(tensor) for tensor in stored.tensors}, tensors())
    source.close()
    assert stored.digests == {name: tensor_digest(tensor) for name, tensor in tensors().items()}


@pytest.mark.case("C104")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_while_copying_is_never_a_mixture(files: _Files, saved: Path, kind: str) -> None:
    files.open()
    CHANGES[kind][0](saved)
    with pytest.raises(WeightPushError) as caught:
        files.copy()
    assert caught.value.code is ErrorCode.FILES_CHANGED


@pytest.mark.case("C104")
def test_files_that_are_not_what_they_should_be_are_refused(root: Path, saved: Path) -> None:
    """A directory that is half old and half new looks whole, to all who do not know what should be in it."""
    digests = {name: tensor_digest(tensor) for name, tensor in tensors().items()}
    replace(saved)
    for expected, code, named in (
        (digests, ErrorCode.DIGEST_MISMATCH, "'layer.2' in the files has digest"),
        ({**digests, "more": "0" * 16}, ErrorCode.CHECKPOINT_DAMAGED, "lack 'more'"),
    ):
        for work in (_Files.copy, _Files.verify):
            files = _Files(saved, [root], expected)

            def load(files: _Files = files, work: Callable[[_Files], object] = work) -> None:
                files.open()
                work(files)

            with pytest.raises(WeightPushError, match=named) as caught:
                load()
            assert caught.value.code is code
            files.close()
    write(saved)
    files = _Files(saved, [root], digests)
    files.open()
    files.verify()
    files.check()
    assert files.copy().digests == digests
    files.close()


def test_everything_is_let_go(root: Path, saved: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        files = _Files(saved, [root], {})
        files.open()
        files.copy()
        assert len(os.listdir("/proc/self/fd")) > before
        files.close()
        files.close()
        files = _Files(saved, [root], {})
        files.open()
        files.close()
        with pytest.raises(AssertionError):
            files.copy()
    assert len(os.listdir("/proc/self/fd")) == before
