"""Tables on a shard: rows by id, their optimizers, and their life. No gRPC, no torch.

What is compiled is imported at its first use, so that a shard without tables starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ps_server.tables.contents import BucketContents
from ps_server.tables.step import RowStep

if TYPE_CHECKING:
    from ps_server.tables.merge import first_nonfinite_row, has_duplicates, merge_rows
    from ps_server.tables.table import Table, warm_up

__all__ = [
    "BucketContents",
    "RowStep",
    "Table",
    "first_nonfinite_row",
    "has_duplicates",
    "merge_rows",
    "warm_up",
]

_COMPILED = {"Table": "table", "warm_up": "table"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_COMPILED.get(name, 'merge')}"), name)
