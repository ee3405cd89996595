"""The names that shards see of variables and tables: the same with and without ``torch.compile``."""

from __future__ import annotations

INNER_MODULE = "_orig_mod"
"""What ``torch.compile`` calls the module inside the one that it makes."""


def plain_name(name: str) -> str:
    """``name``, of a parameter, buffer or module, as it is without ``torch.compile`` around any of its modules."""
    return ".".join(part for part in name.split(".") if part != INNER_MODULE) if INNER_MODULE in name else name
