"""Tables on a shard: rows by id, their optimizers, admission and expiry. No gRPC, no torch.

What is compiled is imported at its first use, so that a shard without tables starts without it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ps_protocol.model.tables import TableSpec
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tables.step import RowStep

if TYPE_CHECKING:
    from ps_server.tables.invalid import first_nonfinite_row, has_duplicates
    from ps_server.tables.row_optimizers import prepared
    from ps_server.tables.saves import SavedBuckets
    from ps_server.tables.table import ShardTable

__all__ = [
    "BucketContents",
    "RowStep",
    "SavedBuckets",
    "ShardTable",
    "first_nonfinite_row",
    "has_duplicates",
    "prepared",
    "warm_up",
]

_COMPILED = {"SavedBuckets": "saves", "ShardTable": "table", "prepared": "row_optimizers"}


def warm_up(spec: TableSpec, on_kernel: Callable[[str], None] = lambda function: None) -> None:
    """Compile or load what a table of this kind needs, so that serving never waits for it. Takes seconds once.

    ``on_kernel`` is called with the name of each function that is ready.
    """
    from ps_protocol.model import kernels

    token = kernels.on_kernel.set(on_kernel)
    try:
        import_module("ps_protocol.wire.row_means")
        import_module(f"{__name__}.table").warm_up(spec)
    finally:
        kernels.on_kernel.reset(token)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_COMPILED.get(name, 'invalid')}"), name)
