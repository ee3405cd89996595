"""Decides the placement of each model: initially, after each move, and at its release."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import InvalidRequest, ModelReleased, NotReady, Unavailable, UnknownModel
from ps_protocol.model.spec import ModelSpec, ShardMap
from ps_server.coordinator.changes import CurrentView, StateChange
from ps_server.coordinator.placement.declaration import PlacementPlan, check_present
from ps_server.coordinator.placement.job_limits import nbytes_of
from ps_server.coordinator.placement.variables import PartitionRule
from ps_server.limits import JobLimits

Uses = Mapping[str, Mapping[int, int]]
"""The incarnation of each worker, by model and rank. Never changed in place: a journal compares it with the last."""


class ModelUses:
    """Part of PlacementState: the workers that use each model. Workers that are no longer members do not count, and are
    removed in time.
    """

    def __init__(self) -> None:
        self._uses: dict[str, Mapping[int, int]] = {}

    @property
    def records(self) -> Uses:
        """The state for ``restore``."""
        return dict(self._uses)

    def restore(self, uses: Uses) -> None:
        """Restore the uses from a journal."""
        self._uses = dict(uses)

    def begin(self, model: str, worker: Member, live: Mapping[int, Member]) -> None:
        """Note that ``worker`` begins to use ``model``."""
        known = self._uses.get(model, {})
        if known.get(worker.index) != worker.incarnation:
            self._uses[model] = {**_alive(known, live), worker.index: worker.incarnation}

    def end(self, model: str, rank: int, incarnation: int) -> bool:
        """End the use of ``model`` by this worker; returns whether it used it."""
        known = self._uses.get(model, {})
        if known.get(rank) != incarnation:
            return False
        self._uses[model] = {each: life for each, life in known.items() if each != rank}
        return True

    def forget(self, model: str) -> None:
        """Remove the model."""
        self._uses.pop(model, None)

    def ranks(self, model: str, live: Mapping[int, Member]) -> list[int]:
        """The workers among ``live``, by rank, that use ``model``, in ascending order."""
        return sorted(_alive(self._uses.get(model, {}), live))


def _alive(uses: Mapping[int, int], live: Mapping[int, Member]) -> dict[int, int]:
    return {rank: life for rank, life in uses.items() if rank in live and live[rank].incarnation == life}


RELEASED_MODELS = 1024
"""So many released models are remembered, by their names. Older ones are forgotten."""


class PlacementState:
    """Part of ClusterState: the shard map of each model, and who uses it. An event that raises changes nothing."""

    def __init__(self, rule: PartitionRule, limits: JobLimits, view: CurrentView) -> None:
        self._rule = rule
        self._limits = limits
        self._view = view
        self._maps: dict[str, ShardMap] = {}
        self.uses = ModelUses()

    @property
    def shard_maps(self) -> Mapping[str, ShardMap]:
        """The shard map of each model."""
        return self._maps

    @property
    def epochs(self) -> dict[str, int]:
        """The epoch of each model's shard map."""
        return {name: shard_map.epoch for name, shard_map in self._maps.items()}

    def restore(self, maps: Mapping[str, ShardMap]) -> None:
        """Restore the models from a journal."""
        self._maps.update(maps)

    def shard_map(self, model: str) -> ShardMap:
        """Where ``model`` is placed. Raises UnknownModel."""
        if model not in self._maps:
            if model in self._view.now.released_models:
                raise self._released(model)
            known = ", ".join(f"'{each}'" for each in self._maps) or "none yet"
            raise UnknownModel(f"no model '{model}' has been declared", expected=known)
        return self._maps[model]

    def plan(
        self, worker: Member, spec: ModelSpec, as_saved: Callable[[ShardMap], ShardMap] | None = None
    ) -> PlacementPlan:
        """The first half of a declaration by ``worker``. The result's ``make`` may run in any thread.

        ``as_saved``: places a new model whose values come from a checkpoint.
        """
        return PlacementPlan(
            spec=spec,
            who=str(worker),
            known=self._maps.get(spec.name),
            shards=self._view.now.used_shards,
            missing=self._missing(self._view.now.used_shards),
            placed=tuple(self._maps.values()),
            rule=self._rule,
            limits=self._limits,
            as_saved=as_saved,
            released=self._view.now.released_models.get(spec.name, 0),
        )

    def adopt(self, worker: Member, plan: PlacementPlan, made: ShardMap) -> StateChange[ShardMap]:
        """The second half of a declaration: use the map ``made`` by ``plan``, unless the model was placed meanwhile.

        ``worker`` then uses the model. Raises NotReady while shards are missing, or if the cluster's shards have
        changed or the model was released meanwhile.
        """
        spec, live = plan.spec, self._view.now.live(Role.WORKER)
        if plan.released != self._view.now.released_models.get(spec.name, 0):
            raise NotReady(f"model '{spec.name}' was released meanwhile", remedy="the worker tries again")
        if plan.known is None and plan.shards != self._view.now.used_shards:
            raise NotReady(
                f"model '{spec.name}' cannot be placed yet: the shards that hold models have changed meanwhile",
                remedy="the worker tries again",
            )
        if plan.known is not None or spec.name in self._maps:
            shard_map = self.shard_map(spec.name)
            self.uses.begin(spec.name, worker, live)
            return StateChange(shard_map)
        check_present(spec, plan.shards, self._missing(plan.shards))
        self._maps[spec.name] = made
        self.uses.begin(spec.name, worker, live)
        self._view.change(models=self.epochs)
        size = f"{nbytes_of(spec)} bytes and {len(spec.tables)} tables"
        return StateChange(made, f"{worker} declared model '{spec.name}': {size} on {len(plan.shards)} shards")

    def close(self, worker: Member, model: str, epoch: int) -> StateChange[None]:
        """Note that ``worker`` no longer uses ``model``, of this ``epoch`` or a later one."""
        if self._view.now.was_released(model, epoch) or not self.uses.end(model, worker.index, worker.incarnation):
            return StateChange(None)
        return StateChange(None, f"{worker} has closed model '{model}'")

    def release(self, model: str, epoch: int = 0) -> StateChange[int]:
        """Remove ``model`` from all shards; its name becomes free. Returns the bytes of its variables.

        ``epoch``: of its shard map; 0: the current one. No effect if that model is already released. Raises NotReady
        while workers use it or slices move, ModelReleased, UnknownModel.
        """
        view = self._view.now
        if epoch and view.was_released(model, epoch):
            return StateChange(0)
        held = self.shard_map(model)
        if ranks := self.uses.ranks(model, view.live(Role.WORKER)):
            named = ", ".join(map(str, ranks))
            raise NotReady(
                f"model '{model}' is used by worker{'s' if len(ranks) > 1 else ''} {named}",
                expected="a model that every worker has closed",
                actual=f"used by {named}",
                remedy="call optimizer.close() in each of them first",
            )
        if view.moving:
            raise NotReady("slices are being moved", actual=f"move {view.moving}", remedy="wait until that has ended")
        del self._maps[model]
        self.uses.forget(model)
        # Newest last.
        known = {name: last for name, last in view.released_models.items() if name != model} | {model: held.epoch}
        self._view.change(models=self.epochs, released_models=dict(list(known.items())[-RELEASED_MODELS:]))
        size = nbytes_of(held.spec)
        return StateChange(size, f"model '{model}' is released: {size} bytes and {len(held.spec.tables)} tables")

    def begin_move(self, move: str) -> StateChange[int]:
        """Begin a move of this name; it lasts from the returned revision until it is committed or aborted.

        Raises NotReady during another move.
        """
        if other := self._view.now.moving:
            raise NotReady("slices are being moved already", actual=f"move {other}", remedy="wait until that has ended")
        self._view.change(moving=move)
        return StateChange(self._view.now.revision, f"move {move} begins")

    def commit_move(self, move: str, maps: Sequence[ShardMap], prepared: Mapping[int, int]) -> StateChange[None]:
        """Replace the shard maps of these models, each by its next epoch. Shards that receive slices are no longer
        spare.

        ``prepared``: the incarnations of the shards that have all slices of the next maps on disk. Raises Unavailable
        if the move was aborted, or if one of them, or a shard with slices before or after, was lost; UnknownModel;
        InvalidRequest for maps other than the next.
        """
        view = self._view.now
        if view.moving != move:
            raise Unavailable("this move of slices was given up", actual=f"move {move}", remedy="move again")
        following = {shard_map.spec.name: shard_map for shard_map in maps}
        needed = set(prepared)
        for name, shard_map in following.items():
            known = self.shard_map(name)
            needed.update(known.holders, shard_map.holders)
            if shard_map.epoch != known.epoch + 1:
                raise InvalidRequest(
                    f"this is not the next shard map of model '{name}'",
                    expected=f"epoch {known.epoch + 1}",
                    actual=f"epoch {shard_map.epoch}",
                    remedy="plan the move again",
                )
        live = view.live(Role.SHARD)
        for number in sorted(needed):
            if number not in live or live[number].incarnation != prepared.get(number):
                raise Unavailable(
                    f"shard {number} was lost while slices moved",
                    shard=str(number),
                    remedy="move again",
                )
        self._maps.update(following)
        self._view.change(models=self.epochs, moving="", spare=view.spare - self._holders)
        moved = ", ".join(f"'{m.spec.name}' to epoch {m.epoch}" for m in maps)
        return StateChange(None, f"move {move} is made: {moved}")

    def abort_move(self, move: str) -> StateChange[None]:
        """End the move without a new shard map. No effect once the move is decided."""
        if self._view.now.moving != move:
            return StateChange(None)
        self._view.change(moving="")
        return StateChange(None, f"move {move} is given up")

    def spare(self, used: Collection[int]) -> frozenset[int]:
        """The shards of the job other than ``used``.

        Raises InvalidRequest for numbers that the job does not have, NotReady if a spare one is not empty.
        """
        shards = self._view.now.expected_shards
        every = frozenset(range(shards))
        if not used or not every.issuperset(used):
            named = ", ".join(map(str, sorted(used))) or "none"
            raise InvalidRequest(
                "these shards cannot hold the models", expected=f"some of 0 to {shards - 1}", actual=named
            )
        spare = every.difference(used)
        if full := spare & self._holders:
            raise NotReady(
                "a shard still holds part of a model", shard=", ".join(map(str, sorted(full))), remedy="drain it"
            )
        return spare

    @property
    def _holders(self) -> frozenset[int]:
        """The shards that have any part of any model."""
        return frozenset().union(*(shard_map.holders for shard_map in self._maps.values()))

    @staticmethod
    def _released(model: str) -> ModelReleased:
        return ModelReleased(
            f"model '{model}' was released",
            actual="no shard holds it any more",
            remedy="declare a model under this name again: cluster.optimizer(..., name=...)",
        )

    def _missing(self, shards: Sequence[int]) -> tuple[int, ...]:
        present = self._view.now.live(Role.SHARD)
        return tuple(number for number in shards if number not in present)
