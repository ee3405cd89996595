"""One model that this worker trains: parameters, gradients and rows in memory, and their exchange with the shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns, perf_counter
from typing import Any

import torch

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import Buffers, NonFinite, Options
from ps_protocol.model.tables import RowOptions
from ps_protocol.tracing.tracer import Attributes, Tracer, TraceSpan
from ps_protocol.wire.formats import RAW
from ps_worker.host.messages import FOREVER
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import Declaration
from ps_worker.model.momentum import MomentumWarning
from ps_worker.model.stray_buffers import ForwardWritten, StrayBuffers
from ps_worker.session.session import Session
from ps_worker.step.assigned_values import AssignedValues, digest
from ps_worker.step.gradients import Gradients
from ps_worker.step.overlap import GradientBuckets, Overlap
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import StepPush, StepSettings, StepSummary, nonfinite_gradient
from ps_worker.tables.binding import TableBinding
from ps_worker.tables.table import TableModule

logger = EventLogger("ps_worker")


_STATE_STAYS = "model '%s' has been trained already: the shards keep their optimizer state"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The optimizer's options that are not as declared: of each parameter group, and of each table."""

    groups: tuple[Options, ...]
    tables: tuple[RowOptions, ...]


class RemoteModel:
    """Made by the optimizer that the user holds, and used by it and by the cluster, in the training thread.

    From other threads: ``is_busy``, ``no_op_step``, ``interrupt`` and ``resume``.
    """

    #: Makes exchanges beside the training thread.
    overlap_class: type[Overlap] = Overlap

    def __init__(
        self,
        session: Session,
        declaration: Declaration,
        tables: TableBinding,
        style: StepSettings,
        options: Callable[[], StepOptions],
        reconnect_timeout_seconds: float,
    ) -> None:
        """Declares the model and returns when it holds the cluster's parameters.

        ``options`` gives those of the next step. Raises PsError: ModelMismatch when another worker declared this model
        differently, Unavailable, Fenced.
        """
        self._session, self._counters = session, session.counters
        #: As this worker declared it.
        self.spec = declaration.spec
        self._bindings = declaration.bindings
        self._tables = tables
        self._has_tables = bool(self.spec.tables)
        self._options = options
        #: Checked at the first step.
        self._strays: StrayBuffers | None = None
        #: Looked at in the first two steps.
        self._forward_written: ForwardWritten | None = ForwardWritten(
            self.name, declaration.bindings, declaration.chosen_buffers
        )
        #: Looked at until it has warned, or has nothing to warn of.
        self._momentum: MomentumWarning | None = MomentumWarning(session, self.spec, overlap=style.overlap)
        shard_map = session.declare(self.spec)
        doubled = style.overlap and style.wire == RAW
        self._flat = FlatModel(declaration.bindings, shard_map, doubled=doubled)
        # Shards change the gradients that they clip: what is parked would change with them.
        two = self._flat.double is not None and not self.spec.clip_grad_norm
        on_host = session.pushes_with_host
        self._gradients = Gradients(self._flat.plan, declaration.bindings, doubled=two, on_host=on_host)
        self.pipeline = StepPipeline(
            session,
            shard_map,
            self._flat,
            self._gradients,
            style,
            initial_rows=declaration.tables.initial_rows(),
            initial_state=declaration.state,
            reconnect_timeout_seconds=reconnect_timeout_seconds,
        )
        self._assigning = AssignedValues(session, self.pipeline, self._flat, style.writes)
        self._overlap = self.overlap_class(self.pipeline) if style.overlap else None
        parameters = declaration.bindings.parameters
        self._buckets = (
            GradientBuckets(self._flat.plan, parameters, self._gradients, self.pipeline) if style.overlap else None
        )
        if self._buckets:
            self.pipeline.on_moved(self._buckets.lay_out)
        self._sends_buffers = self._flat.has_buffers and (self.spec.buffers is Buffers.AVERAGE or session.rank == 0)
        #: What became of the last step; None before the first.
        self.last: StepSummary | None = None
        #: What the user had set when a wait began in which there may be no-op steps; None: there is none.
        self._kept: Mapping[int, torch.Tensor] | None = None
        #: Entered around calls that may wait for other workers.
        self.around = session.exchanging
        self.pipeline.start()
        if declaration.state and session.initialiser() and not self.pipeline.uploaded:
            logger.warning("model.options", _STATE_STAYS, self.name)
        self._momentum.look()
        declaration.tables.forget_initial_rows()
        tables.bind()

    @property
    def name(self) -> str:
        """Name of the model in the job."""
        return self.spec.name

    @property
    def holders(self) -> Sequence[int]:
        """Numbers of the shards that hold anything of the model."""
        return self._flat.plan.holders

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The user's trained parameters, without rows of tables."""
        return self._bindings.parameters

    @property
    def parameter_names(self) -> Sequence[str]:
        """The names of ``parameters`` in the model."""
        return [variable.name for variable in self._bindings.variables[: len(self.parameters)]]

    @property
    def table_modules(self) -> Sequence[TableModule]:
        """The model's modules whose rows are in tables."""
        return self._tables.modules

    @property
    def is_busy(self) -> bool:
        """Whether an exchange goes on beside the training thread."""
        return self._overlap is not None and self._overlap.is_busy

    def watch_stray_buffers(self) -> None:
        """Warn at the first step of buffers that training changes and no model of the cluster has."""
        self._strays = StrayBuffers.around(self._bindings.parameters)

    # -- steps

    def step(self, weight: float = 0.0, *, skip: bool = False) -> None:
        """Push gradients, of rows too, and receive parameters; ``skip``: only move the clock, as for NaN.

        ``weight``: see StepPush. Raises as the optimizer's ``step``.
        """
        began = perf_counter()
        try:
            if (tracer := self._session.instruments.tracer) is None:
                self._step(None, weight, skip)
            else:
                self._step_traced(tracer, weight, skip)
        finally:
            self._counters.stepped(began, perf_counter())

    def _step_traced(self, tracer: Tracer, weight: float, skip: bool) -> None:
        said: Attributes = {"model": self.name, "rank": self._session.rank, "step": self._session.steps + 1}
        trace = tracer.begin("step", f"model {self.name}", monotonic_ns(), said)
        handed_on = False
        try:
            handed_on = self._step(trace, weight, skip)
        finally:
            if not handed_on:
                trace.end(monotonic_ns())

    def _step(self, trace: TraceSpan | None, weight: float, skip: bool) -> bool:
        """As ``step``; returns whether the exchange goes on beside the training thread, and ends ``trace``."""
        self._kept = None
        if written := self._flat.written(on_devices=False):
            with self.around():
                self._assigning.before_step(written, overlaps=self._overlap is not None and self._overlap.is_pending)
        if self._strays:
            self._strays.warn()
            self._strays = None
        if self._forward_written and not skip and not self._forward_written.look(len(self._session.workers)):
            self._forward_written = None
        # The gradient memory is free when the last exchange is finished.
        begin_ns = monotonic_ns() if trace is not None else 0
        if self._overlap is not None:
            self.finish()
        if self._flat.has_moved_storages:
            self._flat.has_moved_storages = False
            self._gradients.make_views_again()
        if trace is not None and self._overlap:
            waited_ns, begin_ns = begin_ns, monotonic_ns()
            trace.part("wait", waited_ns, begin_ns, {"reason": "the exchange of the last step"})
        gathered, staged = self._buckets.collect() if self._buckets else ((), ())
        absent = self._gradients.collect(gathered)
        if self._sends_buffers:
            self._gradients.pushed.collect_buffers()
            self._flat.buffers_sent()
        elif self._flat.has_buffers:
            # Where the buffers of rank 0 are refused, those of all ranks are.
            self._flat.check_buffers()
        ahead = self._session.lookahead if self._overlap else 0
        options = self._options()
        if self._momentum and not self._momentum.look(options.groups):
            self._momentum = None
        push = StepPush(absent, options.groups, self._sends_buffers, skip, False, ahead, staged)
        if self._has_tables:
            push.rows = self._tables.collect()
        push.table_options, push.trace, push.weight = options.tables, trace, weight
        push.looks_on_devices = self._flat.is_mirrored and not written
        if trace is not None:
            trace.part("collect", begin_ns, monotonic_ns())
        if push.looks_on_devices and not ahead:
            # Only now: the devices have been at the gradients' copies meanwhile, which are waited for anyway.
            push.looks_on_devices = False
            if written := self._flat.written_on_devices():
                with self.around():
                    self._assigning.before_step(written)
        self._assigning.has_stepped = True
        if self._overlap and ahead:
            self._gradients.pushed.park()
            self._overlap.begin(partial(self._traced_exchange if trace is not None else self._exchange, push))
            return True
        try:
            with self.around():
                self.last = self._exchange(push)
        finally:
            # Also after an error: parameters of the shards that answered are in host memory.
            begin_ns = monotonic_ns() if trace is not None else 0
            self.pipeline.publish()
            if trace is not None:
                trace.part("load", begin_ns, monotonic_ns())
        if self._has_tables:
            self._tables.clear()
        return False

    def finish(self) -> None:
        """Wait for the exchange under way and take its parameters. Raises the errors of that step."""
        if self._overlap is None or not self._overlap.is_pending:
            return
        self._flat.check_in_place()
        try:
            with self.around():
                self.last = self._overlap.finish() or self.last
        finally:
            self.pipeline.publish()

    def drop_gradients(self, *, in_place: bool) -> None:
        """Drop gradients of rows. ``in_place``: gradients of variables stay in the memory that pushes are sent from."""
        if in_place:
            self._gradients.keep_in_place(pushing=self._overlap is not None)
        if self._has_tables:
            self._tables.clear()

    def _traced_exchange(self, push: StepPush) -> StepSummary:
        """``_exchange`` beside the training thread. Its parameters are loaded in the next step."""
        try:
            return self._exchange(push)
        finally:
            if push.trace is not None:
                push.trace.end(monotonic_ns())

    def _exchange(self, push: StepPush) -> StepSummary:
        """Check the gradients collected, then push them. Raises NonFiniteGradient, with nothing sent, by policy."""
        if push.looks_on_devices and (written := self._flat.written_on_devices()):
            self._assigning.too_late(written)
        if self.spec.clip_grad_norm and not push.skipped:
            push.squared_norm = self._gradients.pushed.squared_norm(push.absent, push.rows)
        if self.spec.nonfinite is not NonFinite.ALLOW:
            variable = self.name if push.skipped else self._first_nonfinite(push)
            push.finite = variable is None
            if variable is not None:
                if self.spec.nonfinite is not NonFinite.SKIP:
                    raise self.refusal(variable)
                self._session.counters.nonfinite += 1
                push.skipped, push.with_buffers, push.staged = True, False, ()
        return self.pipeline.exchange(push)

    def refusal(self, variable: str) -> NonFiniteGradient:
        """The error for a gradient of ``variable`` that holds NaN or infinity. Counts it."""
        self._session.counters.nonfinite += 1
        self._session.counters.refused += 1
        return nonfinite_gradient(variable)

    def _first_nonfinite(self, push: StepPush) -> str | None:
        """Name of the first variable or table with a gradient that holds NaN or infinity."""
        variable = self._gradients.pushed.first_nonfinite(push.absent)
        if variable is None and push.rows is not None:
            wrong = [each.table for each in push.rows.tables if not each.is_finite()]
            return self.spec.tables[wrong[0]].name if wrong else None
        return variable

    # -- the cluster's values and this worker's

    def pull(self, place: str = "cluster.barrier()") -> None:
        """Put the newest parameters and buffers of the cluster into the model. Raises PsError.

        ``place``: the text for a warning about earlier noted values that are replaced.
        """
        self.finish()
        self._kept = None
        self._flat.check_in_place()
        self.pipeline.pull()
        self._assigning.after_barrier(place)

    def begin_waiting(self) -> None:
        """The training thread waits, and there may be no-op steps meanwhile; ``catch_up`` follows. Raises PsError."""
        self.finish_keeping()
        self._kept = self._values_set()
        self.pipeline.away(FOREVER)

    @torch.no_grad()
    def catch_up(self) -> None:
        """The wait is over: pull, but keep values that the user had set before it. Raises PsError."""
        kept = self._kept or {}
        self.pull()
        self.pipeline.is_back()
        tensors = (*self._bindings.parameters, *self._bindings.buffer_values())
        for number, values in kept.items():
            tensors[number].copy_(values)

    def assign(self) -> None:
        """Make this worker's parameters and buffers the cluster's. Raises PsError."""
        self.finish_keeping()
        self._assigning.assign(range(len(self.spec.variables)))

    def flush(self) -> None:
        """At a clean end: send values set after the last step to the shards where possible. Raises PsError."""
        self.finish_keeping()
        self._assigning.at_end()

    def set_values(self, *, with_buffers: bool) -> tuple[str, ...]:
        """Names of the variables that the user has set since the last parameters came, and that count.

        ``with_buffers``: with the buffers that have changed since, where this worker's are the cluster's. Raises
        PsError.
        """
        self.finish_keeping()
        numbers = self._assigning.set_now(with_buffers=with_buffers and self._keeps_buffers)
        return tuple(self.spec.variables[number].name for number in numbers)

    def digests(self) -> tuple[str, str]:
        """Of the bytes of all parameters and of all buffers as the module has them."""
        return digest(self._bindings.parameters), digest(self._bindings.buffer_values())

    def offer_values(self, *, assigns: bool) -> None:
        """Make values that were set the cluster's, with ``assigns``; else note them, for ``pull``. Raises PsError."""
        self.finish_keeping()
        self._assigning.before_barrier(with_buffers=self._keeps_buffers, assigns=assigns)

    @property
    def has_stepped(self) -> bool:
        """Whether this worker has made a step."""
        return self._assigning.has_stepped

    @property
    def _keeps_buffers(self) -> bool:
        """Whether the buffers of this worker are the cluster's."""
        return self._sends_buffers and self.spec.buffers is Buffers.RANK0

    @torch.no_grad()
    def finish_keeping(self) -> None:
        """``finish``, and keep values in the model that the user has set since the last step."""
        pending = self._overlap is not None and self._overlap.is_pending
        kept = {n: self._flat.values_of(n).clone() for n in self._flat.written()} if pending else {}
        self.finish()
        for number, values in kept.items():
            self._bindings.parameters[number].copy_(values)

    def save_state(self) -> tuple[Mapping[int, Mapping[str, torch.Tensor]], Mapping[int, Mapping[str, torch.Tensor]]]:
        """The optimizer's state by parameter number, and what this worker's wire format has left out of gradients."""
        self.finish()
        return self.pipeline.save_state(), self.pipeline.residuals()

    def read_state(self, number: int) -> Mapping[str, torch.Tensor]:
        """The optimizer's present state of one parameter, on the parameter's device. Raises PsError."""
        self.finish()
        device = self._bindings.parameters[number].device
        found = self.pipeline.save_state(number).get(number, {})
        # Counters stay on the CPU, as in torch.
        return {name: value.to(device) if value.dim() else value for name, value in found.items()}

    def load_state(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Give the shards this optimizer state, if this worker has the lowest rank. Raises PsError."""
        if not self._session.initialiser():
            return
        if self.pipeline.joined_running and self.last is None:
            logger.warning("model.options", _STATE_STAYS, self.name)
            return
        self.pipeline.load_state(state)

    # -- barriers, no-op steps

    def keep_open(self) -> None:
        """Open streams that have ended, between two steps, where no exchange is under way. Raises PsError."""
        if self._overlap is None or not self._overlap.is_pending:
            self.pipeline.keep_open()

    def arrive(self, phase: int) -> None:
        """Tell every shard that this worker enters the barrier that ends ``phase``.

        Arrivals are not acknowledged. Called again while waiting, it repeats them on streams that broke meanwhile.
        Values that the worker of the lowest rank has set since its last step become the cluster's. Raises PsError.
        """
        self.finish_keeping()
        self._assigning.before_barrier(with_buffers=self._keeps_buffers)
        self.pipeline.arrive(phase)

    def no_op_step(self) -> None:
        """Make a step without gradients: it only moves this worker's clock, for workers that wait for it.

        Called from another thread while the training thread waits for data, or in a step of another model;
        ``catch_up`` follows. Raises PsError.
        """
        if self._kept is None:
            self._kept = self._values_set()
        options = self._options()
        with self._session.exchanging():
            push = StepPush((), options.groups, skipped=True, table_options=options.tables, alone=True)
            self.pipeline.exchange(push)

    def _values_set(self) -> Mapping[int, torch.Tensor]:
        """Copies of what the user has set since the last parameters came, by number of the variable."""
        written = self._flat.written()
        buffers = self._flat.changed_buffers() if self._keeps_buffers else ()
        tensors = (*self._bindings.parameters, *self._bindings.buffer_values()) if written or buffers else ()
        return {number: tensors[number].detach().clone() for number in (*written, *buffers)}

    def interrupt(self) -> None:
        """From another thread: ``no_op_step`` raises Unavailable where it waits for a shard, until ``resume``."""
        self.pipeline.interrupt()

    def resume(self) -> None:
        """Waiting is possible again."""
        self.pipeline.resume()

    def close(self) -> None:
        """End the streams; may be repeated."""
        if self._overlap:
            self._overlap.close()
        if self._buckets:
            self._buckets.close()
        self._tables.closed = True
        self.pipeline.close()
