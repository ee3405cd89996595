"""``optimizer.state`` of an optimizer whose state is on the shards."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from ps_protocol.errors import UnsupportedOptimizer


class StateOnShards(defaultdict[Any, Any]):
    """Empty; reading the state of a parameter raises UnsupportedOptimizer. Used in the training thread."""

    def __missing__(self, key: object) -> NoReturn:
        """Raises UnsupportedOptimizer."""
        raise UnsupportedOptimizer(
            "optimizer.state[p] is empty on a worker: the optimizer's state is on the shards",
            remedy='read optimizer.state_dict()["state"], by the number of the parameter; '
            "optimizer.load_state_dict(...) writes it",
        )
