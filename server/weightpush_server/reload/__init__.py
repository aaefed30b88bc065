"""Writing a new checkpoint into a live vLLM model, in place, with the result of a cold start, bit for bit.

Read in this order: ``layout`` (what is recorded at cold start), ``plan`` (where tensors will land: ``standins`` and
``trace`` find out, ``program`` is how it is written down, ``admission`` judges by it), ``opening`` (the checkpoint
layout given back), ``landing`` (received tensors written), ``postload`` (processed and proven). ``retention`` is
about what remains of a checkpoint between updates, ``selfcheck`` tries a model out before it serves, and ``refusals``
says which models are not touched at all. ``coverage``, ``journal``, ``contract`` and ``fingerprint`` are what the
proof rests on.
"""

from weightpush_server.reload.admission import Planner
from weightpush_server.reload.landing import ReloadSession, foresee_ways
from weightpush_server.reload.postload import ReloadProof, finish_reload, start_reload
from weightpush_server.reload.refusals import check_awake, check_draft, check_partial, check_reloadable

__all__ = [
    "Planner",
    "ReloadProof",
    "ReloadSession",
    "check_awake",
    "check_draft",
    "check_partial",
    "check_reloadable",
    "finish_reload",
    "foresee_ways",
    "start_reload",
]
