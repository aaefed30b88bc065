"""How a client shows a server who it is, and makes sure which server it talks to: control token and TLS."""

from __future__ import annotations

import os
import ssl
from functools import cached_property
from pathlib import Path
from typing import Final

from weightpush_client.urls import control_token
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.token_files import read_token_file

CA_ENV: Final = "WEIGHTPUSH_CA_FILE"

# What OpenSSL calls a certificate that holds another name or address.
_WRONG_NAME: Final = frozenset({62, 64})
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"})
_WANTS_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "UNKNOWN_CA", "BAD_CERTIFICATE")


class ControlToken:
    """A control token, given as text or by a file, whose first line counts and which is read again when it is refused.

    ``text`` comes from the environment's ``WEIGHTPUSH_CONTROL_TOKEN`` where neither is given.

    Raises:
        WeightPushError: ``invalid_request``: both are given, the file cannot be read or is empty, or the token cannot
            travel in a header. The message repeats no token.
    """

    def __init__(self, text: str | None = None, file: Path | str | None = None) -> None:
        if text is not None and file is not None:
            raise _invalid("give a token or a token file, not both")
        self._file = None if file is None else Path(file)
        self._value = control_token(text) if self._file is None else _read(self._file)

    @property
    def value(self) -> str | None:
        """The token as last read; ``None``: none is sent."""
        return self._value

    def renewed(self, refused: str | None) -> bool:
        """Look at the file again; return whether the token is now another one than ``refused``.

        Raises:
            WeightPushError: ``invalid_request``: the file has become unreadable.
        """
        if self._file is not None:
            self._value = _read(self._file)
        return self._value != refused


def _read(file: Path) -> str:
    try:
        text, _ = read_token_file(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _invalid(f"cannot read the token file {file}: {reason}") from None
    # A server's file may hold several tokens during a rotation; any of them is good.
    token = control_token(next((line for line in text.splitlines() if line.strip()), ""))
    if token is None:
        raise _invalid(f"the token file {file} is empty")
    return token


class Tls:
    """Whom to trust under ``https``, and the client's own certificate where a server asks for one.

    Args:
        verify: True for the system's certificates (or those of the environment's ``WEIGHTPUSH_CA_FILE``), or the path
            of a CA file. There is no way to trust everybody.
        client_cert: path of a PEM file with certificate and key, or the paths of both.

    Raises:
        WeightPushError: ``invalid_request``: there is no such file.
        ValueError: ``verify`` is False.
    """

    def __init__(
        self, verify: bool | str | Path = True, client_cert: str | Path | tuple[str | Path, str | Path] | None = None
    ) -> None:
        if verify is False:
            raise ValueError("certificates are always verified: give the path of a CA file for a private one")
        self._ca_file = (os.environ.get(CA_ENV) or None) if verify is True else str(verify)
        parts = () if client_cert is None else client_cert if isinstance(client_cert, tuple) else (client_cert,)
        self._client_cert = tuple(str(part) for part in parts)
        for file, kind in ((self._ca_file, "CA file"), *((part, "client certificate") for part in self._client_cert)):
            if file is not None and not Path(file).is_file():
                raise _invalid(f"there is no {kind} {file}")

    @cached_property
    def context(self) -> ssl.SSLContext:
        """The settings as Python's ``ssl`` takes them. Loading them takes tens of milliseconds.

        Raises:
            WeightPushError: ``invalid_request``: a file holds no certificates, or no key.
        """
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            raise _invalid(f"the CA file {self._ca_file} cannot be used: {_ssl_reason(error)}") from None
        if self._client_cert:
            certificate, key = self._client_cert[0], self._client_cert[-1]
            try:
                # Without a password's callback OpenSSL would ask on the terminal.
                context.load_cert_chain(certificate, key, password=lambda: b"")
            except OSError as error:
                files = " and ".join(self._client_cert)
                raise _invalid(f"the client certificate {files} cannot be used: {_ssl_reason(error)}") from None
        return context


def explain_tls(error: BaseException, url: str) -> str | None:
    """Say in words why a TLS connection to ``url`` failed; ``None`` where TLS is not the reason."""
    below: BaseException | None = error
    for _ in range(10):
        if below is None or isinstance(below, ssl.SSLError):
            break
        below = below.__cause__ or below.__context__
    if not isinstance(below, ssl.SSLError):
        return None
    if isinstance(below, ssl.SSLCertVerificationError):
        if below.verify_code in _WRONG_NAME:
            return f"its certificate is for another name: {below.verify_message}; use a name that it holds"
        return (
            f"its certificate is not trusted: {below.verify_message}; name the CA that signed it (verify=, --ca-file "
            f"or {CA_ENV})"
        )
    reason = below.reason or ""
    if reason in _NOT_TLS:
        return f"it does not speak TLS ({reason}): write http:// if it should not"
    if any(word in reason for word in _WANTS_CERTIFICATE):
        return f"it wants a client certificate that it trusts ({reason}): client_cert=, --client-cert"
    return f"TLS failed: {_ssl_reason(below)}"


def _ssl_reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


def _invalid(message: str) -> WeightPushError:
    return WeightPushError(ErrorCode.INVALID_REQUEST, message)
