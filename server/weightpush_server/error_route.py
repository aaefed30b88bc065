"""Routes that answer every error in a shape of their own, whatever handlers vLLM's application has."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.log import logger


class ErrorRoute(APIRoute):
    """A route whose errors become what ``answer`` makes of them."""

    @staticmethod
    @abstractmethod
    def answer(error: WeightPushError) -> Response:
        """Return the answer that tells ``error`` to the client."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of FastAPI, guarded."""
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except WeightPushError as error:
                failure = error
            except ClientDisconnect:
                raise
            except Exception as error:  # noqa: BLE001 - every answer has the one error shape
                logger.exception("%s %s", request.method, request.url.path)
                failure = WeightPushError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"[:1000])
            return self.answer(failure)

        return guarded
