"""Weights of vLLM's servers from a job: each worker of a server fetches a published version. **Untested with vLLM.**

vLLM loads ``register`` in each of its processes, as an entry point of group ``vllm.general_plugins``.
"""

from __future__ import annotations

from contextlib import suppress

ENGINE = "torch_ps"
"""What ``WeightTransferConfig(backend=...)`` calls it."""


def register() -> None:
    """Make the engine known to vLLM, where that has such engines; it is imported when it is used. Safe to repeat."""
    # A version without engines; or this process has been here.
    with suppress(ImportError, ValueError):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(ENGINE, "ps_worker.vllm.engine", "PublishedWeightEngine")
