"""Decides where a declared model lies at first, and knows where each lies now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest, NotReady, Unavailable, UnknownModel
from ps_protocol.model import ModelSpec, ShardMap
from ps_server.coordinator.declaration import check_model, check_same
from ps_server.coordinator.job_limits import JobLimits, check_limits, check_shapes
from ps_server.coordinator.placement import PartitionRule, first_map, most_slices


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """All that it takes to place or compare a declared model: values only, so that any thread may do it."""

    spec: ModelSpec
    #: Who declares it, in words.
    who: str
    #: The map of a model of this name.
    known: ShardMap | None
    #: Where a new one is placed, and which of them are not there.
    shards: tuple[int, ...]
    missing: tuple[int, ...]
    #: The maps of all models.
    placed: tuple[ShardMap, ...]
    rule: PartitionRule
    limits: JobLimits
    #: How a new one is placed whose values come from a checkpoint.
    as_saved: Callable[[ShardMap], ShardMap] | None

    def make(self) -> ShardMap:
        """The map. Raises ModelMismatch for another model than the known one, what ``check_limits`` and ``check_model``
        raise, and NotReady while shards are missing.
        """
        check_shapes(self.spec, self.limits)
        if self.known is not None:
            check_same(self.known.spec, self.spec, self.who)
            return self.known
        check_limits(self.spec, most_slices(self.spec, len(self.shards), self.rule), self.placed, self.limits)
        check_model(self.spec)
        _check_present(self.spec, self.shards, self.missing)
        shard_map = first_map(self.spec, self.shards, self.rule)
        return self.as_saved(shard_map) if self.as_saved else shard_map


class Models:
    """Part of ClusterState, which tells of every change in the view. A call that raises has changed nothing."""

    def __init__(self, rule: PartitionRule, limits: JobLimits) -> None:
        self._rule = rule
        self._limits = limits
        self._maps: dict[str, ShardMap] = {}

    @property
    def maps(self) -> Mapping[str, ShardMap]:
        """The shard map of each model."""
        return self._maps

    @property
    def epochs(self) -> dict[str, int]:
        """The epoch of each model's shard map."""
        return {name: shard_map.epoch for name, shard_map in self._maps.items()}

    @property
    def holders(self) -> frozenset[int]:
        """The shards that hold anything of any model."""
        return frozenset().union(*(shard_map.holders for shard_map in self._maps.values()))

    def restore(self, maps: Mapping[str, ShardMap]) -> None:
        """Lie as ``maps`` say."""
        self._maps.update(maps)

    def get(self, name: str) -> ShardMap:
        """Where a model lies. Raises UnknownModel."""
        if name not in self._maps:
            known = ", ".join(f"'{each}'" for each in self._maps) or "none yet"
            raise UnknownModel(f"no model '{name}' has been declared", expected=known)
        return self._maps[name]

    def plan(
        self,
        spec: ModelSpec,
        who: str,
        shards: Sequence[int],
        present: Collection[int],
        as_saved: Callable[[ShardMap], ShardMap] | None,
    ) -> PlacementPlan:
        """How ``spec``, declared by ``who``, is placed on ``shards``, or compared with the model of its name."""
        placed = tuple(self._maps.values())
        known = self._maps.get(spec.name)
        missing = tuple(number for number in shards if number not in present)
        return PlacementPlan(spec, who, known, tuple(shards), missing, placed, self._rule, self._limits, as_saved)

    def place(self, plan: PlacementPlan, made: ShardMap, present: Collection[int]) -> bool:
        """Whether the new map that ``plan`` led to holds from now on; the model lies already otherwise.

        Raises NotReady unless its shards are all ``present``.
        """
        if plan.spec.name in self._maps:
            return False
        _check_present(plan.spec, plan.shards, [number for number in plan.shards if number not in present])
        self._maps[plan.spec.name] = made
        return True

    def spare(self, used: Collection[int], shards: int) -> frozenset[int]:
        """The others of so many ``shards``. Raises InvalidRequest, NotReady when one of them holds anything."""
        every = frozenset(range(shards))
        if not used or not every.issuperset(used):
            named = ", ".join(map(str, sorted(used))) or "none"
            raise InvalidRequest(
                "these shards cannot hold the models", expected=f"some of 0 to {shards - 1}", actual=named
            )
        spare = every.difference(used)
        if full := spare & self.holders:
            raise NotReady(
                "a shard still holds part of a model", shard=", ".join(map(str, sorted(full))), remedy="drain it"
            )
        return spare

    def move(self, maps: Iterable[ShardMap], prepared: Mapping[int, int], live: Mapping[int, int]) -> None:
        """Lie as ``maps`` say, each one epoch on.

        ``prepared``, ``live``: incarnations by shard number. Raises Unavailable when a shard that prepared, or holds
        something before or after, does not live any more, UnknownModel, InvalidRequest.
        """
        following = {shard_map.spec.name: shard_map for shard_map in maps}
        needed = set(prepared)
        for name, shard_map in following.items():
            known = self.get(name)
            needed.update(known.holders, shard_map.holders)
            if shard_map.epoch != known.epoch + 1:
                raise InvalidRequest(
                    f"this is not the next shard map of model '{name}'",
                    expected=f"epoch {known.epoch + 1}",
                    actual=f"epoch {shard_map.epoch}",
                    remedy="plan the move again",
                )
        for number in sorted(needed):
            if number not in live or live[number] != prepared.get(number):
                raise Unavailable(
                    f"shard {number} was lost while slices moved", shard=str(number), remedy="move again: it goes on"
                )
        self._maps.update(following)


def _check_present(spec: ModelSpec, shards: Sequence[int], missing: Sequence[int]) -> None:
    if missing:
        raise NotReady(
            f"model '{spec.name}' cannot be placed yet: {len(missing)} of {len(shards)} shards are missing",
            shard=", ".join(map(str, missing)),
            remedy="start the missing shards; the worker tries again",
        )
