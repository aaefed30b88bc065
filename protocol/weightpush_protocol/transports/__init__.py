"""How buckets travel: one file per transport behind the two protocols of :mod:`.base`.

::

    base.py         TransportConfig, Sender, Receiver, check_available
    endpoints.py    a worker's end of whatever transport ``begin`` names
    shm_sender.py, shm_receiver.py   shared memory on one host
      shm_endpoint.py   what both ends have in common
      frames.py         what lies there: a bucket and its digests
      shared_memory.py  the memory itself, and who shares a host
      local_links.py    the connections over which it is handed out
    collective.py   gloo and nccl: broadcast of buckets in a process group of our own
      rendezvous.py   how its processes find each other, bounded and cancellable
      keyed_store.py  the store that they meet in, open to holders of the update's key
      cancellable.py  leave calls that block without a limit
      groups.py       the process group of each backend: make it, wait for an operation, abort it
      sockets.py      addresses, listening sockets, and connections of this process
    http.py         the bucket as a safetensors file, the body of a request

Everything that a transport raises is a :class:`~weightpush_protocol.errors.WeightPushError`; a wrong argument of the
caller (a buffer of the wrong kind, a call before ``open``) is a ``ValueError`` or ``RuntimeError``.
"""
