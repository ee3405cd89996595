"""Decides where a declared model lies at first, and knows where each lies now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ps_protocol.errors import InvalidRequest, NotReady, Unavailable, UnknownModel
from ps_protocol.model import ModelSpec, ShardMap
from ps_server.coordinator.declaration import check_model, check_same
from ps_server.coordinator.placement import PartitionRule, first_map


class Models:
    """Part of ClusterState, which tells of every change in the view. A call that raises has changed nothing."""

    def __init__(self, rule: PartitionRule) -> None:
        self._rule = rule
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

    def declared(self, spec: ModelSpec, who: str) -> ShardMap | None:
        """The map of the model of this name; None for a new one. Raises ModelMismatch when it is another model."""
        known = self._maps.get(spec.name)
        if known is not None:
            check_same(known.spec, spec, who)
        return known

    def place(
        self,
        spec: ModelSpec,
        shards: Sequence[int],
        present: Collection[int],
        as_saved: Callable[[ShardMap], ShardMap] | None,
    ) -> ShardMap:
        """Place a new model on ``shards``. Raises NotReady unless all are ``present``; what check_model raises."""
        check_model(spec)
        if missing := [number for number in shards if number not in present]:
            raise NotReady(
                f"model '{spec.name}' cannot be placed yet: {len(missing)} of {len(shards)} shards are missing",
                shard=", ".join(map(str, missing)),
                remedy="start the missing shards; the worker tries again",
            )
        shard_map = first_map(spec, shards, self._rule)
        shard_map = self._maps[spec.name] = as_saved(shard_map) if as_saved else shard_map
        return shard_map

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
