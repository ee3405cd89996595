"""Tells the user once of optimizer options that this worker sets and that no step is made with."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ps_protocol.model import ModelSpec
from ps_protocol.text import printable
from ps_protocol.v1 import shard_pb2 as pb

logger = logging.getLogger("ps_worker")


class OptionsLost:
    """Used by one pipeline, by the thread that makes its exchanges."""

    def __init__(self, rank: int, spec: ModelSpec) -> None:
        self._rank = rank
        self._spec = spec
        self._told: set[tuple[str, str, int]] = set()

    def tell(self, differences: Iterable[pb.OptionDifference]) -> None:
        """Log those that have not been told; every shard tells of each, and again on a new stream."""
        for each in differences:
            place, name = self._place(each), printable(each.name)
            if (place, name, each.used_rank) in self._told:
                continue
            self._told.add((place, name, each.used_rank))
            logger.warning(
                "model '%s': in sync a step is made with the options of the lowest rank: %s of %s is %s on worker %d "
                "and is used, %s on worker %d is not; give schedulers the same numbers on all workers, "
                "such as a metric that all of them know",
                self._spec.name,
                name,
                place,
                printable(each.used),
                each.used_rank,
                printable(each.own),
                self._rank,
            )

    def _place(self, difference: pb.OptionDifference) -> str:
        number = difference.table
        if difference.WhichOneof("place") != "table":
            return f"group {difference.group}"
        return f"table '{self._spec.tables[number].name}'" if number < len(self._spec.tables) else f"table {number}"
