"""The optimizer the user holds: torch's interface in front, shards that do the work behind."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ps_protocol import convert
from ps_protocol.errors import ConfigError, NonFiniteGradient, UnsupportedOptimizer
from ps_protocol.model import Buffers, NonFinite, Options
from ps_worker.assigning import Assigning
from ps_worker.bindings import Source
from ps_worker.buckets import Buckets
from ps_worker.declare import Declaration, build_spec, group_options
from ps_worker.flat import FlatModel
from ps_worker.gradients import Gradients
from ps_worker.interfaces import TrainingSession
from ps_worker.overlap import Overlap
from ps_worker.pipeline import RECONNECT_TIMEOUT_SECONDS, StepPipeline
from ps_worker.remote_state import StateOnShards
from ps_worker.stray_buffers import StrayBuffers
from ps_worker.summary import PLAIN, StepSummary, Style, Update
from ps_worker.tables.bound import BoundTables
from ps_worker.tables.groups import TableGroups
from ps_worker.tables.table import TableModule

logger = logging.getLogger("ps_worker")

_RESIDUALS = "ps_residuals"
"""In a ``state_dict``: what this worker's wire format has left out of gradients. It belongs to one rank."""


class PsOptimizer(torch.optim.Optimizer):
    """A ``torch.optim`` optimizer that runs on the shards. Made by ``cluster.optimizer``, used from one thread.

    ``step`` pushes every ``param.grad`` and puts the next parameters into the model, in place. Parameter groups,
    learning-rate schedulers, ``GradScaler``, ``clip_grad_norm_`` and gradient accumulation mean what they mean with the
    torch class itself. The constructor declares the model and returns when it holds the cluster's parameters.

    Each table has a group at the end, with the options of its row optimizer and its name under "table". Its parameters
    are the rows that have got gradients since the last step; ``step`` pushes these and forgets them. ``state_dict`` has
    the options of tables; rows and their state are in checkpoints of the cluster alone.
    """

    _sealed = False

    def __init__(
        self,
        session: TrainingSession,
        torch_class: type[torch.optim.Optimizer],
        declaration: Declaration,
        style: Style = PLAIN,
        *,
        reconnect_timeout_seconds: float = RECONNECT_TIMEOUT_SECONDS,
    ) -> None:
        """Raises PsError: ModelMismatch when another worker declared this model differently, Unavailable, Fenced."""
        self._torch_class = torch_class
        self._session = session
        self._spec = declaration.spec
        super().__init__(declaration.groups, declaration.defaults)
        self._tables = BoundTables(declaration.tables, lambda: self._pipeline, trains=True)
        self._table_groups = TableGroups(self, self._tables)
        self._sealed = True
        self.state = StateOnShards()
        self._bindings = declaration.bindings
        #: Looked at at the first step.
        self._strays = StrayBuffers()
        self._accepted = [set(options) for options in self._spec.group_options]
        self._sent_options: tuple[list[Options], tuple[str, ...]] = [], ()
        shard_map = session.declare(self._spec)
        self._flat = FlatModel(declaration.bindings, shard_map)
        self._gradients = Gradients(self._flat.plan, declaration.bindings)
        self._pipeline = StepPipeline(
            session,
            shard_map,
            self._flat,
            self._gradients,
            style,
            initial_rows=declaration.tables.initial_rows(),
            reconnect_timeout_seconds=reconnect_timeout_seconds,
        )
        self._assigning = Assigning(session, self._pipeline, self._flat, style.writes)
        self._overlap = Overlap(self._pipeline) if style.overlap else None
        parameters = declaration.bindings.parameters
        self._buckets = Buckets(self._flat.plan, parameters, self._gradients, self._pipeline) if style.overlap else None
        if self._buckets:
            self._pipeline.on_moved(self._buckets.lay_out)
        self._sends_buffers = self._flat.has_buffers and (self._spec.buffers is Buffers.AVERAGE or session.rank == 0)
        #: What became of the last step; None before the first.
        self.last: StepSummary | None = None
        #: Entered around what may wait for other workers.
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._pipeline.start()
        declaration.tables.forget_initial_rows()
        self._tables.bind()

    @classmethod
    def declare(
        cls,
        session: TrainingSession,
        torch_class: type[torch.optim.Optimizer],
        source: Source,
        arguments: Mapping[str, Any],
        *,
        name: str,
        nonfinite: str = "refuse",
        buffers: str = "rank0",
        style: Style = PLAIN,
        tables: Iterable[object] = (),
        module: torch.nn.Module | None = None,
        held: Mapping[int, str] = MappingProxyType({}),
        reconnect_timeout_seconds: float = RECONNECT_TIMEOUT_SECONDS,
    ) -> PsOptimizer:
        """What ``cluster.optimizer`` calls. Raises what ``build_spec`` and the constructor raise."""
        declaration = build_spec(
            torch_class,
            source,
            arguments,
            name=name,
            nonfinite=nonfinite,
            buffers=buffers,
            tables=tables,
            seed=lambda: session.seed,
            module=module,
            held=held,
        )
        if style.overlap and declaration.tables.specs:
            raise ConfigError(
                "overlap=True is not possible with tables",
                actual=", ".join(table.name for table in declaration.tables.specs),
                remedy="leave it out, and look rows up ahead with cluster.prefetch(...)",
            )
        optimizer = cls(session, torch_class, declaration, style, reconnect_timeout_seconds=reconnect_timeout_seconds)
        if not isinstance(source, torch.nn.Module) and module is None and declaration.spec.buffers is not Buffers.LOCAL:
            optimizer._strays = StrayBuffers.around(declaration.bindings.parameters)
        return optimizer

    @property
    def name(self) -> str:
        """Name of the model in the job."""
        return self._spec.name

    @property
    def holders(self) -> Sequence[int]:
        """Numbers of the shards that hold anything of the model."""
        return self._flat.plan.holders

    @property
    def trained_parameters(self) -> Sequence[torch.Tensor]:
        """The user's parameters that it trains, without rows of tables."""
        return self._bindings.parameters

    @property
    def table_modules(self) -> Sequence[TableModule]:
        """The model's modules whose rows are in tables."""
        return self._tables.modules

    @property
    def version(self) -> int:
        """Updates contained in the parameters held: those that every shard has done."""
        return self._pipeline.version

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push gradients, of rows too, and receive parameters. Returns what ``closure`` returned.

        Raises NonFiniteGradient, with nothing sent, when a gradient holds NaN or infinity and the policy is "refuse".
        Raises Unavailable when a shard stayed away too long, StateLost, Fenced. Where exchanges overlap, what became of
        one is raised by the next call, and ``last`` is that of the step before.

        Values that the user has set since the last step (``load_state_dict``, a clamp) are the cluster's before this
        step is applied to them, as ``writes`` says (docs/guarantees.md). Raises InvalidRequest where others' updates
        would be lost with them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.around():
            self._assigning.before_step(overlaps=self._overlap is not None and self._overlap.is_pending)
        self._strays.warn_once(logger)
        # The memory that gradients are collected in is free when the last exchange is finished.
        self.finish()
        gathered, staged = self._buckets.settle() if self._buckets else ((), ())
        absent = self._gradients.collect(gathered)
        if self._sends_buffers:
            self._gradients.collect_buffers()
            self._flat.buffers_sent()
        ahead = self._session.lookahead if self._overlap else 0
        update = Update(
            absent,
            self._options(),
            self._sends_buffers,
            ahead=ahead,
            staged=staged,
            rows=self._tables.collect() if self._spec.tables else None,
            table_options=self._table_groups.options(self.param_groups),
        )
        self._assigning.has_stepped = True
        if self._overlap and ahead:
            self._overlap.begin(partial(self._exchange, update))
            return loss
        try:
            with self.around():
                self.last = self._exchange(update)
        finally:
            # Also after an error: what shards did send has arrived in host memory.
            self._pipeline.publish()
        self._tables.clear()
        return loss

    def finish(self) -> None:
        """With ``overlap``: wait for the exchange under way and take its parameters. Else nothing is under way.

        Raises what became of that step, as ``step`` does.
        """
        if self._overlap is None:
            return
        try:
            with self.around():
                self.last = self._overlap.finish() or self.last
        finally:
            self._pipeline.publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients of rows are dropped.

        With ``set_to_none=False`` gradients stay where pushes are taken from, which saves a copy.
        """
        # With overlap the last push may still be taken from there.
        if not set_to_none and self._overlap is None:
            self._gradients.keep_in_place()
        self._tables.clear()
        super().zero_grad(set_to_none)

    def pull(self) -> None:
        """Put the newest parameters and buffers of the cluster into the model, for evaluation. Raises PsError.

        What the user has set since the last step is replaced.
        """
        self.finish()
        self._pipeline.pull()
        self._assigning.after_barrier()

    def assign(self) -> None:
        """Make this worker's parameters and buffers the cluster's, whatever the mode. Raises PsError.

        Call it on one worker, then ``cluster.barrier()`` on all: from then on all have them. Updates that other workers
        have pushed meanwhile are replaced; the optimizer's state stays (``load_state_dict`` sets that).
        """
        self._finish_keeping()
        self._assigning.assign(range(len(self._spec.variables)))

    def settle(self) -> None:
        """At a clean end of the job: what was set after the last step goes to the shards where it can. Raises PsError.

        Called by ``cluster.close``.
        """
        self._finish_keeping()
        self._assigning.at_end()

    @torch.no_grad()
    def _finish_keeping(self) -> None:
        """``finish``, with what the user has set since the last step still in the model."""
        pending = self._overlap is not None and self._overlap.is_pending
        kept = {n: self._flat.values_of(n).clone() for n in self._flat.written()} if pending else {}
        self.finish()
        for number, values in kept.items():
            self._bindings.parameters[number].copy_(values)

    def arrive(self, phase: int) -> None:
        """Tell every shard that this worker enters the barrier that ends ``phase``. Called by ``cluster.barrier``.

        Arrivals are not acknowledged. Called again while waiting, it repeats them on streams that broke meanwhile.
        What the worker of the lowest rank has set since its last step is the cluster's then. Raises PsError.
        """
        self._finish_keeping()
        self._assigning.before_barrier(with_buffers=self._sends_buffers and self._spec.buffers is Buffers.RANK0)
        self._pipeline.arrive(phase)

    def close(self) -> None:
        """End the streams. Called by ``cluster.close``; safe to repeat."""
        if self._overlap:
            self._overlap.close()
        if self._buckets:
            self._buckets.close()
        self._tables.closed = True
        self._pipeline.close()

    @property
    def is_busy(self) -> bool:
        """Whether an exchange goes on beside the training thread."""
        return self._overlap is not None and self._overlap.is_busy

    def stand_in(self) -> None:
        """Make a step without gradients: it moves this worker's clock for others that wait for it, and nothing else.

        Called from another thread while the training thread waits for data, or in a step of another model. Raises
        PsError.
        """
        self._pipeline.exchange(
            Update((), self._options(), skipped=True, table_options=self._table_groups.options(self.param_groups))
        )

    def interrupt(self) -> None:
        """From another thread: ``stand_in`` raises Unavailable where it waits for a shard, until ``resume``."""
        self._pipeline.interrupt()

    def resume(self) -> None:
        """Nothing waits any more: go on as usual."""
        self._pipeline.resume()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state from the shards, as ``torch_class(...).state_dict()`` would give it. Raises PsError.

        Of tables it has the options alone.
        """
        self.finish()
        state = self._pipeline.save_state()
        parameters = self._parameters()
        self.state = defaultdict(dict, {parameters[number]: dict(values) for number, values in state.items()})
        try:
            with self._table_groups.without_rows(self):
                saved = super().state_dict()
        finally:
            self.state = StateOnShards()
        if residuals := self._pipeline.residuals():
            saved[_RESIDUALS] = {"rank": self._session.rank, "state": residuals}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state from a ``state_dict`` of this optimizer or of the torch class.

        All workers may call it; the one of the lowest rank sends the state to the shards, except when it came to a job
        whose training had begun and has not stepped itself: then the shards know better. Call ``cluster.barrier()``
        before going on. Raises ValueError as torch does when the groups differ, InvalidRequest for state that does not
        fit. One without tables leaves their options as they are.
        """
        self.finish()
        with self._table_groups.without_rows(self):
            super().load_state_dict(self._table_groups.completed(self, state_dict))
        residuals = state_dict.get(_RESIDUALS)
        if residuals and residuals["rank"] == self._session.rank:
            self._pipeline.load_residuals(residuals["state"])
        parameters = self._parameters()
        state = {number: self.state[p] for number, p in enumerate(parameters) if p in self.state}
        self.state = StateOnShards()
        if not self._session.initialiser():
            return
        if self._pipeline.joined_running and self.last is None:
            logger.warning("model '%s' has been trained already: the shards keep their optimizer state", self.name)
            return
        self._pipeline.load_state(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the model is declared."""
        if self._sealed:
            raise UnsupportedOptimizer(
                "a declared model cannot get more parameters",
                remedy="declare them all at once, frozen with requires_grad=False until needed, or as another model",
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise UnsupportedOptimizer(
            "an optimizer that runs on shards can be neither copied nor pickled",
            remedy="use state_dict(), and call cluster.optimizer(...) in each process",
        )

    def __repr__(self) -> str:
        shards = len(self._flat.plan.holders)
        place = f"{shards} shard{'s' if shards > 1 else ''}"
        return f"{self._torch_class.__name__} on {place}" + super().__repr__().removeprefix(type(self).__name__)

    def _options(self) -> tuple[str, ...]:
        """Each group's options as JSON, written anew when they have changed."""
        groups = zip(self._table_groups.others(self.param_groups), self._accepted, strict=True)
        options = [group_options(group, accepted) for group, accepted in groups]
        if options != self._sent_options[0]:
            self._sent_options = options, tuple(map(convert.options_to_json, options))
        return self._sent_options[1]

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._table_groups.others(self.param_groups) for p in group["params"]]

    def _first_nonfinite(self, update: Update) -> str | None:
        """Name of the first variable or table with a gradient that holds NaN or infinity."""
        variable = self._gradients.first_nonfinite(update.absent)
        if variable is None and update.rows is not None:
            wrong = [each.table for each in update.rows.tables if not each.is_finite()]
            return self._spec.tables[wrong[0]].name if wrong else None
        return variable

    def _exchange(self, update: Update) -> StepSummary:
        """Look at the gradients collected, then push them. Raises NonFiniteGradient, with nothing sent, by policy."""
        if self._spec.nonfinite is NonFinite.ALLOW:
            return self._pipeline.exchange(update)
        variable = self._first_nonfinite(update)
        if variable is None:
            return self._pipeline.exchange(replace(update, finite=True))
        if self._spec.nonfinite is NonFinite.SKIP:
            return self._pipeline.exchange(replace(update, skipped=True, with_buffers=False, staged=()))
        raise NonFiniteGradient(
            "a gradient holds NaN or infinity; nothing was sent",
            variable=variable,
            remedy='lower the learning rate, clip gradients, or pass nonfinite="skip" to cluster.optimizer',
        )
