"""The models that one worker trains, and the calls that concern all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch

from ps_protocol.cluster.view import ClosedModelAsk
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.logs import EventLogger
from ps_worker.deadlock_avoidance import DeadlockAvoidance, no_op_steps, worker_clocks
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel
from ps_worker.tables.table import TableModule

logger = EventLogger("ps_worker")

_trained: set[tuple[str, int, str]] = set()
"""Models that this process trained in connections that it has closed: coordinator, seed of the job, name. A later
connection of the process may continue such a model by mistake."""


class TrainedModels:
    """The models of a worker, in the order in which they were declared. Used from the training thread."""

    def __init__(self, session: Session, default_name: str = "model") -> None:
        """``default_name``: of the first model without a name; later ones have a number behind it."""
        self._session = session
        self._default_name = default_name
        self._models: dict[str, RemoteModel] = {}
        #: Names of models that this worker trains, or has closed without releasing them.
        self._names: set[str] = set()
        #: Number of models so far.
        self._count = 0
        #: None with fewer than two models.
        self._deadlock_avoidance: DeadlockAvoidance | None = None

    def __iter__(self) -> Iterator[RemoteModel]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    @property
    def held(self) -> dict[int, str]:
        """Name of the model of each parameter that is trained, by ``id`` of the parameter."""
        return {id(p): name for name, model in self._models.items() for p in model.parameters}

    def find(self, source: torch.optim.Optimizer | torch.nn.Module | None) -> RemoteModel:
        """The model that an optimizer or a module is trained as; None: the only one. Raises InvalidRequest."""
        if source is None:
            found = list(self)
        else:
            groups = (
                source.param_groups if isinstance(source, torch.optim.Optimizer) else [{"params": source.parameters()}]
            )
            wanted = {id(parameter) for group in groups if "table" not in group for parameter in group["params"]}
            found = [model for model in self if wanted & set(map(id, model.parameters))]
        if len(found) != 1:
            raise InvalidRequest(
                "it is not clear which model is meant" if found else "no model of this worker is meant",
                expected="an optimizer or a module of one of these models: " + (", ".join(self._models) or "none"),
                actual=", ".join(model.name for model in found) or type(source).__name__,
                remedy="give the optimizer that cluster.optimizer() returned",
            )
        return found[0]

    def table_modules(self) -> list[TableModule]:
        """Return the modules of all models whose rows are in tables."""
        return [module for model in self for module in model.table_modules]

    def free_name(self, name: str | None) -> str:
        """Return ``name``, or the default for the next model. Raises ConfigError for one that this worker uses or has
        used.

        Models that were released do not count.
        """
        count = self._count
        chosen = name or self._default_name + (f"-{count}" if count else "")
        if chosen in self._models:
            raise ConfigError(f"this worker has an optimizer named '{chosen}' already", remedy="give each its own name")
        if chosen in self._names:
            raise ConfigError(
                f"this worker's optimizer named '{chosen}' was closed, and the shards keep its model",
                expected="a name that this worker has not used",
                actual=chosen,
                remedy="give the new optimizer another name, or end the first with close(release=True)",
            )
        return chosen

    def add(self, model: RemoteModel) -> None:
        """Add a declared model. With several models, deadlocks with other workers are avoided."""
        self._models[model.name] = model
        self._names.add(model.name)
        self._count += 1
        self._warn_of_another_life(model)
        if len(self) < 2 or self._session.takes_turns:
            return
        if self._deadlock_avoidance is None:
            self._deadlock_avoidance = DeadlockAvoidance(
                self._session.rank,
                lambda: self,
                partial(worker_clocks, self._session),
                lambda: self._session.view.consistency,
            )
        for each in self:
            each.around = partial(self._deadlock_avoidance.waiting, each)

    def _warn_of_another_life(self, model: RemoteModel) -> None:
        """Warn if this process has trained ``model`` before, in a connection that it has closed."""
        pipeline = model.pipeline
        goes_on = pipeline.joined_running or (self._session.initialiser() and not pipeline.uploaded)
        if goes_on and self._key(model.name) in _trained:
            logger.warning(
                "model.options",
                "model '%s' goes on: this process trained it before, in a connection to this job that it closed; it "
                "begins with the values and the optimizer state of %d updates; for another model give it a name of its "
                "own, cluster.optimizer(..., name=...) or connect(name=...), or end the first one with "
                "optimizer.close(release=True)",
                model.name,
                pipeline.version,
            )

    def _key(self, name: str) -> tuple[str, int, str]:
        return self._session.config.coordinator, self._session.seed, name

    def meet(self) -> None:
        """Wait until every live worker is at this barrier, then take the newest values. Raises PsError."""
        self._session.pass_barrier(self.arrive)
        self.pull()

    def end_use(self, ended: Iterable[RemoteModel], *, release: bool) -> None:
        """Wait for all workers as at a barrier, take the last values, and stop using these models. Raises PsError.

        ``release``: the shards drop them, and their names are free again. A call after an error continues.
        """
        models = list(ended)
        if any(model.name in self._models for model in models):
            self.meet()
        for model in models:
            self._models.pop(model.name, None)
            model.close()
        for model in models:
            end_use(self._session, model, release=release)
            if release:
                self._names.discard(model.name)
                _trained.discard(self._key(model.name))

    def idle(self) -> AbstractContextManager[None]:
        """Return the context for waiting for data: no-op steps keep others from waiting for this worker's steps."""
        return no_op_steps(list(self), lambda: self._session.view.consistency.mode.bounded)

    def arrive(self) -> None:
        """Report to the shards that this worker has come to the barrier of its phase. Raises PsError."""
        for model in self:
            model.arrive(self._session.phase)

    def keep_open(self) -> None:
        """Open streams that have ended, between two steps. A shard that was started again may have forgotten pushes of
        this worker, and what has all shards at one point would wait for them. Raises PsError.
        """
        for model in self:
            model.keep_open()

    def pull(self) -> None:
        """Take the newest parameters of each model. Raises PsError."""
        for model in self:
            model.pull()

    def finish(self) -> None:
        """Wait for exchanges under way. Raises the errors of those steps."""
        for model in self:
            model.finish()

    def flush(self) -> None:
        """At a clean end: send values that were set after the last steps, where possible. Raises PsError."""
        for model in self:
            model.flush()

    def close(self) -> None:
        """End the streams of all models, whatever fails. Safe to repeat."""
        _trained.update(map(self._key, self._names))
        with ExitStack() as ending:
            for model in reversed(list(self)):
                ending.callback(model.close)
            if self._deadlock_avoidance:
                self._deadlock_avoidance.close()


def end_use(session: Session, model: RemoteModel, *, release: bool) -> None:
    """Close ``model``, and report that this worker uses it no more; the report of the last worker releases it
    (``release``).

    A release waits for the other workers. Raises NotReady, naming them, when they do not close it in time; Fenced.
    """
    model.close()
    session.close_model(ClosedModelAsk(model.name, model.pipeline.shard_map.epoch, release))
