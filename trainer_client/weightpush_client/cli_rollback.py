"""``weightpush rollback``."""

from __future__ import annotations

from typing import Annotated

import typer

from weightpush_client.cli_common import (
    CaFileOption,
    ClientCertOption,
    TokenFileOption,
    TokenOption,
    readable_errors,
    stdout,
)
from weightpush_client.pusher import WeightPusher
from weightpush_protocol.messages import InFlight


def rollback(
    url: Annotated[list[str], typer.Argument(metavar="URL...", help="Servers, e.g. localhost:8000.")],
    in_flight: Annotated[InFlight, typer.Option("--in-flight", help="What becomes of running requests.")] = (
        InFlight.WAIT
    ),
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Let servers go back to the weights of which they keep a copy.

    \b
    weightpush rollback localhost:8000
    weightpush rollback http://gpu-1:8000 http://gpu-2:8000

    A failed server goes back to the version that it committed last, a serving one to the version before that. It keeps
    copies if it was started with --keep-previous; `weightpush status` shows of what.
    """
    with readable_errors():
        pusher = WeightPusher(
            url,
            token=token,
            token_file=token_file,
            in_flight=in_flight,
            verify=True if ca_file is None else ca_file,
            client_cert=client_cert,
        )
        with pusher:
            stdout().print(str(pusher.rollback()))
