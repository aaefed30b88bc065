"""The command ``weightpush``: serve, push, rollback, status, watch, verify, abort.

Exit codes: 0 done, 1 the push failed or a server does not serve, 2 unreachable or wrong usage, 3 pushed, but not to all
servers, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from weightpush_client.cli_common import UNREACHABLE_EXIT, exit_code, print_error, stdout
from weightpush_client.cli_push import push
from weightpush_client.cli_rollback import rollback
from weightpush_client.cli_serve import PassThrough, serve
from weightpush_client.cli_status import abort, status
from weightpush_client.cli_verify import verify
from weightpush_client.cli_watch import watch
from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.errors import WeightPushError

_HELP = """Push fresh weights into a live vLLM server, in place, and never serve a half-updated model.

\b
A first push, in three terminals:
  export WEIGHTPUSH_CONTROL_TOKEN=...                          the same in all three
  weightpush serve Qwen/Qwen3-0.6B --port 8000                 terminal 1: a vLLM server
  weightpush watch localhost:8000                              terminal 2: what it is doing
  weightpush push ./checkpoint --url localhost:8000 --version step-1

\b
Exit codes: 0 done; 1 the push failed or a server does not serve; 2 unreachable or wrong usage; 3 pushed, but servers
were excluded.
The control token comes from WEIGHTPUSH_CONTROL_TOKEN or from --token-file.
"""

app = typer.Typer(
    name="weightpush",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve", cls=PassThrough, short_help="Start a vLLM server whose weights can be pushed.")(serve)
app.command("push", short_help="Push a checkpoint directory into one or more servers.")(push)
app.command("rollback", short_help="Let servers go back to the weights of before.")(rollback)
app.command("status", short_help="Show what servers serve, and whether they do.")(status)
app.command("watch", short_help="Follow a server's updates with a progress bar.")(watch)
app.command("verify", short_help="Check that a server holds what was committed, and which checkpoint that is.")(verify)
app.command("abort", short_help="End the update that runs on a server.")(abort)


def _print_version(wanted: bool) -> None:
    if wanted:
        stdout().print(f"weightpush {distribution_version('weightpush')}, protocol {PROTOCOL_VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version of weightpush and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except WeightPushError as error:
        print_error(error)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left, as `| head` does; there is nobody to tell.
        sys.stderr.close()
        sys.exit(UNREACHABLE_EXIT)
