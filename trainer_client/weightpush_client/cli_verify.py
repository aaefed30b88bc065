"""``weightpush verify``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from weightpush_client.align import align
from weightpush_client.cli_common import (
    FAILED_EXIT,
    CaFileOption,
    ClientCertOption,
    TokenFileOption,
    TokenOption,
    read_token,
    readable_errors,
    stdout,
    verify_of,
)
from weightpush_client.digests import digests_of
from weightpush_client.membership import connected
from weightpush_client.sources import open_source
from weightpush_client.urls import normalise_url
from weightpush_protocol.messages import VerifyAnswer, VerifyDifference, VerifyRequest

_KINDS = {
    "digest": "other bytes",
    "unrecorded": "not comparable: its digest was not taken when it was loaded",
    "unknown": "the server's weights have no such tensor",
    "missing": "the checkpoint has no such tensor",
    "wrong_shape": "other shape",
    "wrong_dtype": "other dtype",
    "duplicate": "twice in the checkpoint",
    "changed": "changed in memory since the commit",
    "vanished": "gone from memory since the commit",
}


def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, e.g. localhost:8000.")],
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="DIR", help="Directory with a safetensors checkpoint to compare with."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's report as JSON.")] = False,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Check that a server still holds what was committed, and with --against that this is a checkpoint of yours.

    \b
    weightpush verify localhost:8000
    weightpush verify localhost:8000 --against ./checkpoint

    The server reads all its weights once, and generation waits meanwhile. The checkpoint is read here; only digests
    travel. Exit code 0 if equal, 1 if something differs (the first tensors are named), 2 if it cannot be reached.
    """
    with readable_errors():
        source = open_source(against) if against is not None else None
        with connected((normalise_url(url),), read_token(token, token_file), verify_of(ca_file, client_cert)) as fleet:
            request = VerifyRequest()
            if source is not None:
                expected = fleet.call(lambda _, server: server.manifest())[0]
                outgoing = align(source, expected)
                request = VerifyRequest(
                    tensors=tuple(item.sent for item in outgoing), digests=digests_of(source, outgoing)
                )
            answer = fleet.call(lambda _, server: server.verify(request))[0]
        if as_json:
            stdout().print(answer.model_dump_json(indent=2))
        else:
            for line in _lines(answer, against):
                stdout().print(line)
        if not answer.equal:
            raise typer.Exit(FAILED_EXIT)


def _lines(answer: VerifyAnswer, against: Path | None) -> Iterator[str]:
    if answer.intact:
        yield (
            f"intact: all {answer.tensors} tensors in memory are as committed (version {answer.weight_version}, "
            f"fingerprint {answer.fingerprint_now[:16]})"
        )
    else:
        yield (
            f"CHANGED: {answer.changed_total} of {answer.tensors} tensors in memory are not as they were committed "
            f"(version {answer.weight_version}); push again or restart the server"
        )
        yield from _differences(answer.changed, answer.changed_total)
    if answer.converted:
        yield f"converted by the runtime itself since the commit, which is no fault: {', '.join(answer.converted)}"
    if answer.unseen_bytes:
        yield (f"{answer.unseen_bytes / 1e6:.1f} MB are packed in native handles: only their landing could be checked")
    if against is None:
        return
    if answer.differing_total == 0:
        yield f"equal: what was committed is {against} ({answer.compared} tensors)"
    else:
        yield f"DIFFERENT: {answer.differing_total} tensors of {against} are not what was committed"
        yield from _differences(answer.differing, answer.differing_total)


def _differences(differences: list[VerifyDifference], total: int) -> Iterator[str]:
    for item in differences:
        sides = [f"{label} {value}" for label, value in (("expected", item.expected), ("found", item.given)) if value]
        where = [f"worker {item.worker_rank}"] if item.kind in ("changed", "vanished") else []
        yield f"  {item.name}: {', '.join([_KINDS.get(item.kind, item.kind), *sides, *where])}"
    if total > len(differences):
        yield f"  ... and {total - len(differences)} more"
