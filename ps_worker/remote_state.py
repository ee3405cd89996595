"""Tells code that looks for optimizer state in ``optimizer.state`` where it is."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from ps_protocol.errors import UnsupportedOptimizer


class StateOnShards(defaultdict[Any, Any]):
    """What an optimizer has as ``state`` between its own calls: empty, and an error for code that reads a parameter's.

    Used in the training thread, as torch's mapping in its place is.
    """

    def __missing__(self, key: object) -> NoReturn:
        """Raises UnsupportedOptimizer."""
        raise UnsupportedOptimizer(
            "optimizer.state[p] is empty on a worker: the optimizer's state is on the shards",
            remedy='read optimizer.state_dict()["state"], by the number of the parameter; '
            "optimizer.load_state_dict(...) writes it",
        )
