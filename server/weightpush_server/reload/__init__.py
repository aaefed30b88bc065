"""Writing a new checkpoint into a live vLLM model, in place, with the result of a cold start, bit for bit.

Read in this order: ``layout`` (what is recorded at cold start), ``opening`` (the checkpoint layout given back),
``landing`` (received tensors written), ``postload`` (processed and proven). ``coverage``, ``journal``, ``contract`` and
``fingerprint`` are what the proof rests on; ``refusals`` says which models are not touched at all.
"""

from weightpush_server.reload.landing import ReloadSession
from weightpush_server.reload.postload import ReloadProof, finish_reload, start_reload
from weightpush_server.reload.refusals import check_reloadable

__all__ = ["ReloadProof", "ReloadSession", "check_reloadable", "finish_reload", "start_reload"]
