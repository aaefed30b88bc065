"""vLLM's own weight-transfer routes, carried out as updates of ours: what ``weightpush serve --compat vllm`` adds.

One round of a client written for vLLM (``/start_weight_update`` ... ``/finish_weight_update``) is one staged update:
the tensors are collected in host memory while the old weights serve, and ``finish`` checks that they are a whole
checkpoint, closes the gate, lands, proves and publishes them. Read ``router`` (the calls), ``rounds`` (what each does
to the update), ``worker`` and ``transfer`` (how a worker takes part in the trainer's broadcasts), ``packing`` (what
lies where in them), ``nccl`` (the connection), ``holding`` (``/pause`` and ``/resume``).
"""
