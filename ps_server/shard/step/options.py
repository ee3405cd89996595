"""The optimizer arguments that come with a push: checked against the declared ones, and those without effect noted.

In sync a step is made with the arguments of its lowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ps_protocol.errors import InvalidRequest
from ps_protocol.logs import EventLogger
from ps_protocol.model.optimizers import EXECUTION_HINTS
from ps_protocol.model.option_ranges import require_in_range
from ps_protocol.model.spec import ModelSpec, Option, OptionDifference, Options
from ps_protocol.model.tables import RowOptions, validate_options
from ps_server.consistency import WorkerKey
from ps_server.optimizers.catalog import check_options
from ps_server.shard.step.push import IncomingPush

logger = EventLogger(__name__)

_TEXT_CHARACTERS = 80


def merge_options(spec: ModelSpec, pushed: Sequence[Options]) -> tuple[Options, ...]:
    """Per group, the declared arguments overlaid with the pushed ones.

    Raises InvalidRequest when groups are missing or too many, a name was not declared, or a value is of another kind or
    not finite; UnsupportedOptimizer when it is out of range or torch refuses it. So no push brings an
    update that fails half-way.
    """
    if len(pushed) != len(spec.group_options):
        raise InvalidRequest(
            f"options for the wrong number of parameter groups of model '{spec.name}'",
            expected=str(len(spec.group_options)),
            actual=str(len(pushed)),
        )
    merged = tuple(
        _merge(spec.name, group, declared, options)
        for group, (declared, options) in enumerate(zip(spec.group_options, pushed, strict=True))
    )
    require_in_range(spec, merged)
    check_options(spec, merged)
    return merged


def merge_row_options(spec: ModelSpec, pushed: Sequence[RowOptions]) -> tuple[RowOptions, ...]:
    """Per table, the declared arguments overlaid with the pushed ones. Raises InvalidRequest, UnsupportedOptimizer."""
    if len(pushed) != len(spec.tables):
        raise InvalidRequest(
            f"options for the wrong number of tables of model '{spec.name}'",
            expected=str(len(spec.tables)),
            actual=str(len(pushed)),
        )
    merged = tuple({**table.options, **options} for table, options in zip(spec.tables, pushed, strict=True))
    for table, options in zip(spec.tables, merged, strict=True):
        validate_options(table, options)
    return merged


def _merge(model: str, group: int, declared: Options, pushed: Options) -> Options:
    for name, value in pushed.items():
        if name not in declared or not (name in EXECUTION_HINTS or _same_kind(declared[name], value)):
            raise InvalidRequest(
                f"optimizer argument '{name}' of group {group} of model '{model}' does not fit",
                expected=f"{name}={declared[name]!r}" if name in declared else ", ".join(sorted(declared)),
                actual=f"{name}={value!r}",
                remedy="push the arguments the optimizer was declared with",
            )
    return {**declared, **pushed}


def _same_kind(declared: Option, value: Option) -> bool:
    """Whether ``value`` can stand where ``declared`` stood."""
    if declared is None or value is None:
        return declared is value
    if isinstance(declared, bool) or isinstance(value, bool):
        return isinstance(declared, bool) and isinstance(value, bool)
    if isinstance(declared, list) and isinstance(value, list):
        return len(declared) == len(value) and all(map(_same_kind, declared, value))
    if isinstance(declared, (int, float)):
        return isinstance(value, (int, float)) and _finite(value)
    return type(declared) is type(value)


def _finite(value: float) -> bool:
    """Whether torch can compute with ``value``."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class OptionDifferences:
    """Used by one ShardModel, on the shard's event loop."""

    def __init__(self, model: str) -> None:
        self._model = model
        #: In the order in which they were found, never more than options and ranks.
        self.known: dict[WorkerKey, dict[tuple[int, bool, str, int], OptionDifference]] = {}

    def note(self, pushes: Sequence[IncomingPush]) -> None:
        """One step is made of ``pushes``, in rank order, with the options of the first."""
        first = pushes[0]
        first_rows = next((push for push in pushes if push.rows is not None), None)
        for push in pushes[1:]:
            if push.options != first.options:
                self._add(push, first, push.options, first.options, is_table=False)
            if push.rows and first_rows and first_rows.rows and push.rows.options != first_rows.rows.options:
                self._add(push, first_rows, push.rows.options, first_rows.rows.options, is_table=True)

    def of(self, worker: WorkerKey) -> Sequence[OptionDifference]:
        """All that are known of ``worker``; new ones come at the end."""
        return list(self.known[worker].values()) if worker in self.known else ()

    def members(self, live: Mapping[int, int]) -> None:
        """Forget workers that have gone. ``live``: rank to incarnation."""
        for worker in [each for each in self.known if live.get(each.rank) != each.incarnation]:
            del self.known[worker]

    def _add(
        self,
        push: IncomingPush,
        used: IncomingPush,
        own: Sequence[Options],
        others: Sequence[Options],
        *,
        is_table: bool,
    ) -> None:
        known = self.known.setdefault(push.info.worker, {})
        for place, name in _differing(own, others):
            found = OptionDifference(
                place,
                is_table,
                name,
                used.info.first_worker.rank,
                _brief(others[place].get(name)),
                _brief(own[place].get(name)),
            )
            if found.key not in known:
                known[found.key] = found
                logger.warning(
                    "model.options",
                    "model '%s': worker %d pushes %s=%s in %s %d, and worker %d, whose options are used, %s",
                    self._model,
                    push.info.worker.rank,
                    name,
                    repr(found.own),
                    "table" if is_table else "group",
                    place,
                    found.used_rank,
                    repr(found.used),
                )


def _differing(own: Sequence[Options], others: Sequence[Options]) -> Iterator[tuple[int, str]]:
    for place, (one, other) in enumerate(zip(own, others, strict=True)):
        yield from ((place, name) for name in one if one[name] != other.get(name))


def _brief(value: Option) -> Option:
    """``value`` with its texts cut short: it is kept, and sent to workers."""
    if isinstance(value, list):
        return list(map(_brief, value))
    return value[:_TEXT_CHARACTERS] if isinstance(value, str) else value
