"""Remembers which options workers push in vain: in sync a step is made with those of its lowest rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency import WorkerKey
from ps_server.shard.combining import Push

logger = logging.getLogger(__name__)

_TEXT_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class OptionDifference:
    """One option of a worker that was not used."""

    #: Number of the parameter group, or of the table.
    place: int
    is_table: bool
    name: str
    used_rank: int
    #: Values as JSON, which has no control characters.
    used: str
    own: str

    @property
    def key(self) -> tuple[int, bool, str, int]:
        """What makes it another difference: values change with every step of a schedule."""
        return self.place, self.is_table, self.name, self.used_rank


class OptionDifferences:
    """Used by one ShardModel, on the shard's event loop."""

    def __init__(self, model: str) -> None:
        self._model = model
        #: In the order in which they were found, never more than options and ranks.
        self._known: dict[WorkerKey, dict[tuple[int, bool, str, int], OptionDifference]] = {}

    def note(self, pushes: Sequence[Push]) -> None:
        """One step is made of ``pushes``, in rank order, with the options of the first."""
        if len(pushes) < 2:
            return
        first = pushes[0]
        first_rows = next((push for push in pushes if push.rows is not None), None)
        for push in pushes[1:]:
            if push.options != first.options:
                self._add(push, first, push.options, first.options, is_table=False)
            if push.rows and first_rows and first_rows.rows and push.rows.options != first_rows.rows.options:
                self._add(push, first_rows, push.rows.options, first_rows.rows.options, is_table=True)

    def of(self, worker: WorkerKey) -> Sequence[OptionDifference]:
        """All that are known of ``worker``; new ones come at the end."""
        return list(self._known[worker].values()) if worker in self._known else ()

    def members(self, live: Mapping[int, int]) -> None:
        """Forget workers that have gone. ``live``: rank to incarnation."""
        for worker in [each for each in self._known if live.get(each.rank) != each.incarnation]:
            del self._known[worker]

    def _add(
        self,
        push: Push,
        used: Push,
        own: Sequence[Mapping[str, object]],
        others: Sequence[Mapping[str, object]],
        *,
        is_table: bool,
    ) -> None:
        known = self._known.setdefault(push.info.worker, {})
        for place, name in _differing(own, others):
            found = OptionDifference(
                place,
                is_table,
                name,
                used.info.worker.rank,
                _shown(others[place].get(name)),
                _shown(own[place].get(name)),
            )
            if found.key not in known:
                known[found.key] = found
                logger.warning(
                    "model '%s': worker %d pushes %s=%s in %s %d, and worker %d, whose options are used, %s",
                    self._model,
                    push.info.worker.rank,
                    name,
                    found.own,
                    "table" if is_table else "group",
                    place,
                    found.used_rank,
                    found.used,
                )


def difference_to_pb(difference: OptionDifference) -> pb.OptionDifference:
    """As a worker is told of it."""
    message = pb.OptionDifference(
        name=difference.name, used_rank=difference.used_rank, used=difference.used, own=difference.own
    )
    if difference.is_table:
        message.table = difference.place
    else:
        message.group = difference.place
    return message


def _differing(
    own: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]]
) -> Iterator[tuple[int, str]]:
    for place, (one, other) in enumerate(zip(own, others, strict=True)):
        yield from ((place, name) for name in one if one[name] != other.get(name))


def _shown(value: object) -> str:
    return json.dumps(value)[:_TEXT_CHARACTERS]
