"""What README and docs say holds: commands have a test that runs them, links lead somewhere, codes are all there."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from support.documented import LANGUAGES, PAGES, PYTHON, ROOT, RULES, Block, blocks, rule_of
from weightpush_protocol.errors import HTTP_STATUS, ErrorCode

_SHELL = [(block, command) for block in blocks("sh") for command in block.commands]


def _place(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_every_block_says_what_it_is() -> None:
    assert [_place(block) for block in blocks() if block.language not in LANGUAGES] == []
    assert len(_SHELL) > 40


def test_every_command_has_something_that_runs_it() -> None:
    used = {rule_of(command) for _, command in _SHELL}
    assert [rule.pattern for rule in RULES if rule not in used] == []
    for rule in used:
        assert bool(rule.tested_by) != bool(rule.reason)
        if rule.tested_by:
            assert rule.program in (ROOT / rule.tested_by).read_text()


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block, command in _SHELL:
        if command.startswith("make "):
            named = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
            assert set(named) <= targets, f"{_place(block)}: {command}"


def test_every_option_of_serve_exists() -> None:
    from weightpush_server import options

    parser = argparse.ArgumentParser()
    options.add_own_options(parser)
    served = [
        shlex.split(command, comments=True)[2:] for _, command in _SHELL if command.startswith("weightpush serve ")
    ]
    assert len(served) > 4
    for words in served:
        # The supervisor's own, and vLLM's.
        _, left = parser.parse_known_args([word for word in words if word != "--help=weightpush"])
        unknown = {word for word in left if word.startswith("--")}
        assert unknown <= {"--host", "--port", "--restart-on-failure"}, words


@pytest.mark.parametrize("block", blocks("python"), ids=_place)
def test_every_piece_of_python_has_something_that_runs_it(block: Block) -> None:
    compile(block.text, _place(block), "exec")
    runs = [file for page, text, file in PYTHON if page == block.page and text in block.text]
    assert len(runs) == 1, "tests/support/documented.py says of no file, or of several, that it runs this"
    assert (ROOT / runs[0]).exists()


def test_the_names_of_your_own() -> None:
    (block,) = [block for block in blocks("python") if "def names(name)" in block.text]
    found: dict[str, object] = {}
    exec(compile(block.text, _place(block), "exec"), found)
    names = found["names"]
    assert callable(names)
    assert [names(name) for name in ("v_head.weight", "pretrained_model.norm")] == [None, "norm"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.exists(), target
        if anchor:
            assert anchor in _anchors(there), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_error_code_is_explained() -> None:
    """With the status that it is sent with, where a table says so."""
    explained: dict[str, str | None] = {}
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        if found := re.match(r"\| `(\w+)` \|(?: (\d{3}) \|)? ", line):
            assert found[1] not in explained
            explained[found[1]] = found[2]
    assert set(explained) == set(ErrorCode)
    for code, status in explained.items():
        if status is not None:
            assert HTTP_STATUS[ErrorCode(code)] == int(status), code


def test_the_changelog_knows_this_version() -> None:
    from importlib.metadata import version

    assert f"\n## {version('weightpush')}" in (ROOT / "CHANGELOG.md").read_text()
