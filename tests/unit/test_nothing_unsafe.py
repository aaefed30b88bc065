"""Nothing that arrives is ever unpickled, evaluated or executed: the product does not even name what could do it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted(
    file for folder in ("protocol", "server", "trainer_client", "examples") for file in (ROOT / folder).rglob("*.py")
)
#: Modules that turn bytes into objects or code.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "jsonpickle", "joblib"}
#: Names that do, wherever they come from.
NAMES = {
    *("eval", "exec", "compile", "__import__"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "_tensor_to_object", "_object_to_tensor", "run_path", "run_module", "allow_pickle"),
}
#: ``torch.load``, ``numpy.load``: what a call of this name would be; ``json.load`` and ``tomllib.load`` are data only.
LOADERS = {"torch", "np", "numpy"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.ImportFrom):
            yield from (name.name for name in node.names if name.name in NAMES)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in NAMES - {"eval", "compile"}:
            yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr == "load" and getattr(node.value, "id", "") in LOADERS:
            yield "load"
        elif isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"}:
            yield node.arg


@pytest.mark.case("C26")
@pytest.mark.parametrize("file", PRODUCT, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_product_names_nothing_that_runs_what_it_reads(file: Path) -> None:
    assert list(offences(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.detect",
        "eval('1')",
        "exec(code)",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "dist.broadcast_object_list(objects)",
        "from torch.distributed import all_gather_object",
        "subprocess.run(text, shell=True)",
        "import yaml",
        "__import__(name)",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert list(offences(ast.parse(text)))


def test_the_search_looks_at_everything() -> None:
    found = {file.parent.name for file in PRODUCT}
    assert {"weightpush_protocol", "transports", "weightpush_server", "reload", "weightpush_client"} <= found
