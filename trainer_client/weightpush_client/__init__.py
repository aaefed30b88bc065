"""The trainer's side of weightpush: push fresh weights into a live vLLM server, in place.

::

    from weightpush_client import WeightPusher

    with WeightPusher("http://gpu-7:8000") as pusher:
        print(pusher.push(model, weight_version="step-1"))

Imports torch and httpx; never vLLM, FastAPI or ray.
"""

from weightpush_client.background import PushHandle
from weightpush_client.policy import OnServerFailure
from weightpush_client.pusher import WeightPusher
from weightpush_client.report import (
    ExcludedServer,
    PhaseSeconds,
    PushError,
    PushPhase,
    PushProgress,
    PushReport,
    ServerReport,
)
from weightpush_client.sources import Weights
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import Deadlines, DigestKind, InFlight, UpdateMode
from weightpush_protocol.status import Status

__all__ = [
    "Deadlines",
    "DigestKind",
    "ErrorCode",
    "ExcludedServer",
    "InFlight",
    "OnServerFailure",
    "PhaseSeconds",
    "PushError",
    "PushHandle",
    "PushPhase",
    "PushProgress",
    "PushReport",
    "ServerReport",
    "Status",
    "UpdateMode",
    "WeightPushError",
    "WeightPusher",
    "Weights",
]
