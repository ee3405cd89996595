"""Warns once of optimizer options that this worker sets and that no step uses."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import ModelSpec, OptionDifference
from ps_protocol.text import printable

logger = EventLogger("ps_worker")


class UnusedOptions:
    """Used by one pipeline, by the thread that makes its exchanges."""

    def __init__(self, rank: int, spec: ModelSpec) -> None:
        self._rank = rank
        self._spec = spec
        self._told: set[tuple[str, str, int]] = set()

    def tell(self, differences: Iterable[OptionDifference]) -> None:
        """Log each difference once; every shard reports it, and repeats it on a new stream."""
        for each in differences:
            place, name = self._place(each), printable(each.name)
            if (place, name, each.used_rank) in self._told:
                continue
            self._told.add((place, name, each.used_rank))
            logger.warning(
                "model.options",
                "model '%s': in sync a step is made with the options of the lowest rank: %s of %s is %s on worker %d "
                "and is used, %s on worker %d is not; give schedulers the same numbers on all workers, "
                "such as a metric that all of them know",
                self._spec.name,
                name,
                place,
                printable(repr(each.used)),
                each.used_rank,
                printable(repr(each.own)),
                self._rank,
            )

    def _place(self, difference: OptionDifference) -> str:
        number = difference.place
        if not difference.is_table:
            return f"group {number}"
        return f"table '{self._spec.tables[number].name}'" if number < len(self._spec.tables) else f"table {number}"
