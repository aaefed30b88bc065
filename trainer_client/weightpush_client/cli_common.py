"""What the commands share: options, the control token, errors as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from weightpush_client.access import ControlToken, Tls
from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode, WeightPushError

FAILED_EXIT: Final = 1
UNREACHABLE_EXIT: Final = 2
#: The push was committed, but not by all servers.
EXCLUDED_EXIT: Final = 3
# Offenders that the terminal shows; the server's answer holds more.
_SHOWN: Final = 20
_FILE_WIDTH: Final = 200

TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Control token. Others on this machine can read a command line: prefer WEIGHTPUSH_CONTROL_TOKEN "
        "or --token-file.",
    ),
]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File that holds the control token.")
]
CaFileOption = Annotated[
    Path | None, typer.Option("--ca-file", metavar="FILE", help="Certificates to trust, for https with a private CA.")
]


ClientCertOption = Annotated[
    Path | None,
    typer.Option("--client-cert", metavar="FILE", help="Certificate and key (PEM) to show a server that asks for one."),
]


def read_token(token: str | None, token_file: Path | None) -> ControlToken:
    """Return the control token of the options, else the environment's.

    Raises:
        WeightPushError: ``invalid_request``: both options, an unreadable or an empty file.
    """
    return ControlToken(token, token_file)


def verify_of(ca_file: Path | None, client_cert: Path | None = None) -> Tls:
    """Return whom ``--ca-file`` says to trust, and what ``--client-cert`` shows.

    Raises:
        WeightPushError: ``invalid_request``: no such file.
    """
    return Tls(True if ca_file is None else ca_file, client_cert)


def exit_code(error: WeightPushError) -> int:
    """Return 2 for a server that cannot be reached or a wrong command line, 1 for anything else."""
    usage = error.code is ErrorCode.INVALID_REQUEST and getattr(error, "server", None) is None
    return UNREACHABLE_EXIT if usage or error.code is ErrorCode.UNREACHABLE else FAILED_EXIT


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn a `WeightPushError` into a few lines on standard error and the exit code."""
    try:
        yield
    except WeightPushError as error:
        print_error(error)
        raise typer.Exit(exit_code(error)) from None


def stderr() -> Console:
    """Return a console on standard error; prints text as it is, whatever markup a server's message holds."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def stdout() -> Console:
    """Return a console on standard output; prints text as it is, and wide tables where no screen limits them."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    return console


def print_error(error: WeightPushError) -> None:
    """Print one line with the code, then the details, one offender a line."""
    console = stderr()
    server = f" {error.server}:" if isinstance(error, PushError) and error.server else ""
    # Offenders follow one a line; in the message they would stand a second time.
    message = error.message.partition(": ")[0] if "problems" in error.details else error.message
    console.print(f"error:{server} {message} [{error.code.value}]", style="red")
    if error.code is ErrorCode.UNAUTHORIZED:
        console.print("  give the server's control token: WEIGHTPUSH_CONTROL_TOKEN or --token-file (not its --api-key)")
    if error.state is not None:
        console.print(f"  server state: {error.state.value}")
    for line in _detail_lines(error.details):
        console.print(f"  {line}")


def _detail_lines(details: Mapping[str, Any]) -> Iterator[str]:
    for key, value in details.items():
        if isinstance(value, list):
            yield f"{key}:"
            yield from (f"  {_one_line(item)}" for item in value[:_SHOWN])
            if len(value) > _SHOWN:
                yield f"  ... and {len(value) - _SHOWN} more"
        else:
            yield f"{key}: {_one_line(value)}"


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return " ".join(str(value).split())
