"""The files of deploy/ as data, for tests of them, and of a server that is run as they say."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
USER: Final = 10001


@dataclass
class Dockerfile:
    """The last stage of a Dockerfile, what it is built on, and all that is copied from the context."""

    path: Path
    arguments: dict[str, str] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    last: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        """Parse ``path``."""
        found = cls(path)
        text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            word, _, rest = line.strip().partition(" ")
            if word == "ARG":
                name, _, default = rest.partition("=")
                found.arguments.setdefault(name, default.strip('"'))
            elif word == "FROM":
                image = re.sub(r"\$\{(\w+)\}", lambda match: found.arguments[match[1]], rest.split()[0])
                found.bases.append(image)
                found.last = {}
            elif word == "COPY" and "--from" not in rest:
                found.copies += rest.split()[:-1]
            elif word:
                found.last[word] = f"{found.last[word]}\n{rest}" if word in found.last else rest
        return found

    def command(self, word: str) -> list[str]:
        """Return the words of an instruction in exec form (``ENTRYPOINT``, ``CMD``)."""
        words: list[str] = json.loads(self.last[word])
        return words

    @property
    def health_check(self) -> list[str]:
        """The command that says whether the server serves."""
        words: list[str] = json.loads(self.last["HEALTHCHECK"].partition(" CMD ")[2])
        return words


class _ComposeLoader(yaml.SafeLoader):
    """Knows the tags by which one compose file changes another."""


for _tag in ("!override", "!reset"):
    _ComposeLoader.add_constructor(
        _tag,
        lambda loader, node: (
            loader.construct_sequence(node)
            if isinstance(node, yaml.SequenceNode)
            else loader.construct_mapping(node)
            if isinstance(node, yaml.MappingNode)
            else None
        ),
    )


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    """Return a compose file."""
    # A subclass of the safe loader.
    document: dict[str, Any] = yaml.load((DEPLOY / name).read_text(), Loader=_ComposeLoader)
    return document


def kubernetes() -> list[dict[str, Any]]:
    """Return all objects of deploy/kubernetes."""
    files = [file for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if file.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [document for document in kubernetes() if document["kind"] == kind]


def stateful_set() -> dict[str, Any]:
    """Return the servers of deploy/kubernetes."""
    (found,) = of_kind("StatefulSet")
    return found


def container() -> dict[str, Any]:
    """Return the server's container."""
    (found,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    return dict(found)


def unit() -> dict[str, list[str]]:
    """Return the settings of the systemd unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "weightpush.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def unit_environment() -> dict[str, str]:
    """Return the variables of the unit's file of settings."""
    lines = (DEPLOY / "systemd" / "server.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def unit_command() -> list[str]:
    """Return the command of the unit as systemd would run it: a variable that stands alone becomes several words."""
    variables = unit_environment()
    words: list[str] = []
    for word in unit()["ExecStart"][0].split():
        words += shlex.split(variables[word[1:]]) if word.startswith("$") else [word]
    return words
