"""The optimizer of the user: torch's interface to optimizers that run on the shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any, NoReturn, cast

import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.model.spec import Buffers, Options
from ps_protocol.wire.convert.options import changed_options
from ps_worker.model.bindings import Source
from ps_worker.model.declare import Declaration, build_spec, group_options
from ps_worker.model.remote_state import StateOnShards
from ps_worker.session.session import Session
from ps_worker.step.pipeline import RECONNECT_TIMEOUT_SECONDS
from ps_worker.step.remote_model import RemoteModel, StepOptions
from ps_worker.step.summary import PLAIN, Outcome, StepSummary, Style, checked_weight
from ps_worker.tables.binding import TableBinding
from ps_worker.tables.groups import TableGroups

_RESIDUALS = "ps_residuals"
"""Key in a ``state_dict``: what this worker's wire format has left out of gradients. It belongs to one rank."""

_OF_TORCH = ("step", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes of an instance that tell how torch runs its step: the scheduler's wrapper, and how it is fused."""


class PsOptimizer(torch.optim.Optimizer):
    """A ``torch.optim`` optimizer that runs on the shards. Made by ``cluster.optimizer``, used from one thread.

    ``step`` pushes every ``param.grad`` and puts the next parameters into the model, in place. Parameter groups,
    learning-rate schedulers, ``GradScaler``, ``clip_grad_norm_`` and gradient accumulation work as with the torch class
    itself. The constructor declares the model and returns when it holds the cluster's parameters.

    Each table has a group at the end, with the options of its row optimizer and its name under "table". Its parameters
    are the rows that have got gradients since the last step; ``step`` pushes these and forgets them. ``state_dict`` has
    the options of tables; rows and their state are in checkpoints of the cluster alone.

    An instance is also one of the torch class (``on_shards``), so that ``isinstance`` tells what it computes; nothing
    of that class runs here.
    """

    #: The class that shards run; set by ``on_shards``.
    _torch_class: type[torch.optim.Optimizer]
    _sealed = False
    #: Accelerate leaves a prepared optimizer as it is; else it reads and writes all state once.
    _is_accelerate_prepared = True

    def __init__(
        self, session: Session, declaration: Declaration, style: Style, reconnect_timeout_seconds: float
    ) -> None:
        """Raises as ``_attach``."""
        torch.optim.Optimizer.__init__(self, declaration.groups, declaration.defaults)
        self._attach(session, declaration, style, reconnect_timeout_seconds)

    def _attach(
        self, session: Session, declaration: Declaration, style: Style, reconnect_timeout_seconds: float
    ) -> None:
        """Declare the model of the present groups, and return when it holds the cluster's parameters; called once.

        Raises PsError: ModelMismatch when another worker declared this model differently, Unavailable, Fenced.
        """
        # torch's hooks around ``step`` are a matter of the class.
        self._patch_step_function()
        tables = TableBinding(declaration.tables, lambda: self._model.pipeline, trains=True)
        self._table_groups = TableGroups(self, tables)
        self._sealed = True
        self.state = StateOnShards(self._read_state)
        self._rank = session.rank
        #: Names of the options of each group.
        self._accepted = [set(options) for options in declaration.spec.group_options]
        self._accepted += [set(table.options) for table in declaration.spec.tables]
        #: The values that options were read from last; None: they may change in place.
        self._option_values: list[object] | None = None
        self._sent_options: tuple[list[Options], tuple[Options, ...]] = [], ()
        self._declared = declaration.spec.group_options
        self._step_options = StepOptions((), ())
        self._model = RemoteModel(session, declaration, tables, style, self._options, reconnect_timeout_seconds)

    @property
    def name(self) -> str:
        """Name of the model in the job."""
        return self._model.name

    @property
    def version(self) -> int:
        """Updates contained in the parameters held: those that every shard has done."""
        return self._model.pipeline.version

    @property
    def last(self) -> StepSummary | None:
        """The result of the last step; None before the first."""
        return self._model.last

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient held NaN or infinity (``nonfinite="skip"``)."""
        return self.last is not None and self.last.outcome is Outcome.SKIPPED

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, weight: float | None = None
    ) -> float | None:
        """Push gradients, of rows too, and receive parameters. Returns what ``closure`` returned.

        ``weight``: in sync, what these gradients weigh in the mean of the step, such as the number of samples in the
        batch; a push without one weighs 1. In async and ssp it has no effect: a push is applied alone. Raises
        InvalidRequest, with nothing sent, unless it is positive and finite.

        Raises NonFiniteGradient, with nothing sent, when a gradient holds NaN or infinity and the policy is "refuse".
        Raises Unavailable when a shard did not answer in time, StateLost, Fenced. Where exchanges overlap, the next
        call raises the errors of an exchange, and ``last`` is the result of the step before.

        Values that the user has set since the last step (``load_state_dict``, a clamp) become the cluster's before this
        step is applied, depending on ``writes`` (docs/guarantees.md). Raises InvalidRequest where updates of other
        workers would be lost.
        """
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._model.step(checked_weight(weight) if weight is not None else 0.0)
        return loss

    # Schedulers of torch wrap ``step`` to see that it is called before theirs; this one tells them by itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def finish(self) -> None:
        """With ``overlap``: wait for the exchange under way and take its parameters. Without it, does nothing.

        Raises the errors of that step, as ``step`` does.
        """
        self._model.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients of rows are dropped.

        With ``set_to_none=False`` gradients stay in the memory that pushes are sent from, which saves a copy.
        """
        self._model.drop_gradients(in_place=not set_to_none)
        super().zero_grad(set_to_none)

    def pull(self) -> None:
        """Put the newest parameters and buffers of the cluster into the model, for evaluation. Raises PsError.

        Values that the user has set since the last step are replaced.
        """
        self._model.pull()

    def assign(self) -> None:
        """Make this worker's parameters and buffers the cluster's, whatever the mode. Raises PsError.

        Call it on one worker, then ``cluster.barrier()`` on all; after that all workers have them. Updates that other
        workers have pushed meanwhile are replaced. The optimizer's state stays; ``load_state_dict`` sets it.
        """
        self._model.assign()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state from the shards, as ``torch_class(...).state_dict()`` would give it. Raises PsError.

        Of tables it has only the options.
        """
        state, residuals = self._model.save_state()
        parameters = self._parameters()
        self.state = defaultdict(dict, {parameters[number]: dict(values) for number, values in state.items()})
        try:
            with self._table_groups.without_rows(self):
                saved = super().state_dict()
        finally:
            self.state = StateOnShards(self._read_state)
        if residuals:
            saved[_RESIDUALS] = {"rank": self._rank, "state": residuals}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state from a ``state_dict`` of this optimizer or of the torch class.

        All workers may call it. The worker of the lowest rank sends the state to the shards, unless it joined a job
        that had begun training and has made no step: then the shards keep their state. Call ``cluster.barrier()``
        afterwards. Raises ValueError as torch does when the groups differ, InvalidRequest for state that does not fit.
        A state without tables leaves their options as they are.
        """
        self.finish()
        with self._table_groups.without_rows(self):
            super().load_state_dict(self._table_groups.completed(self, state_dict))
        residuals = state_dict.get(_RESIDUALS)
        if residuals and residuals["rank"] == self._rank:
            self._model.pipeline.streams.load_residuals(residuals["state"])
        parameters = self._parameters()
        state = {number: self.state[p] for number, p in enumerate(parameters) if p in self.state}
        self.state = StateOnShards(self._read_state)
        self._model.load_state(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the model is declared."""
        if self._sealed:
            raise UnsupportedOptimizer(
                "a declared model cannot get more parameters",
                remedy="declare them all at once, frozen with requires_grad=False until needed, or as another model",
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # ``load_state_dict`` ends here. The list stays the same one: schedulers and other optimizers may share it.
        groups = self.param_groups
        torch.optim.Optimizer.__setstate__(self, state)
        groups[:] = self.param_groups
        self.param_groups = groups

    def __getstate__(self) -> NoReturn:
        raise UnsupportedOptimizer(
            "an optimizer that runs on shards can be neither copied nor pickled",
            remedy="use state_dict(), and call cluster.optimizer(...) in each process",
        )

    def __repr__(self) -> str:
        shards = len(self._model.holders)
        place = f"{shards} shard{'s' if shards > 1 else ''}"
        return f"{self._torch_class.__name__} on {place}" + super().__repr__().removeprefix(type(self).__name__)

    def _options(self) -> StepOptions:
        """The options of the next step that are not as declared; the same object until one is set."""
        pairs = zip(self.param_groups, self._accepted, strict=True)
        values = [group.get(name) for group, accepted in pairs for name in accepted]
        if self._option_values is not None and all(map(is_, values, self._option_values)):
            return self._step_options
        self._option_values = values if all(map(_is_immutable, values)) else None
        groups = zip(self._table_groups.others(self.param_groups), self._accepted, strict=False)
        options = [group_options(group, accepted) for group, accepted in groups]
        if options != self._sent_options[0]:
            self._sent_options = options, tuple(map(changed_options, self._declared, options))
        self._step_options = StepOptions(self._sent_options[1], self._table_groups.options(self.param_groups))
        return self._step_options

    def _read_state(self, parameter: torch.Tensor) -> Mapping[str, Any] | None:
        number = next((n for n, each in enumerate(self._parameters()) if each is parameter), None)
        return None if number is None else self._model.read_state(number)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._table_groups.others(self.param_groups) for p in group["params"]]


def on_shards(torch_class: type[torch.optim.Optimizer]) -> type[PsOptimizer]:
    """The class of optimizers that run ``torch_class`` on shards: a PsOptimizer that is one of ``torch_class``, too."""
    members = {"_torch_class": torch_class, "__doc__": PsOptimizer.__doc__, "__module__": __name__}
    return cast(type[PsOptimizer], type(torch_class.__name__, (PsOptimizer, torch_class), members))


def _is_immutable(value: object) -> bool:
    return (
        value is None
        or isinstance(value, int | float | str)
        or (type(value) is tuple and all(map(_is_immutable, value)))
    )


def declare_optimizer(
    session: Session,
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
) -> tuple[PsOptimizer, RemoteModel]:
    """The optimizer for the user, and the model for the cluster. Raises what ``build_spec`` and PsOptimizer raise."""
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
    check_style(style, declaration)
    optimizer = on_shards(torch_class)(session, declaration, style, reconnect_timeout_seconds)
    model = optimizer._model
    if not isinstance(source, torch.nn.Module) and module is None and declaration.spec.buffers is not Buffers.LOCAL:
        model.watch_stray_buffers()
    return optimizer, model


def take_over(
    given: torch.optim.Optimizer,
    session: Session,
    declaration: Declaration,
    style: Style,
    reconnect_timeout_seconds: float,
) -> tuple[PsOptimizer, RemoteModel]:
    """``given``, an optimizer of torch, becomes one on shards: whoever has it, such as a scheduler, has that one.

    After an error it is as it was. Raises what PsOptimizer raises.
    """
    before, attributes, groups = type(given), dict(vars(given)), len(given.param_groups)
    given.__class__ = on_shards(before)
    adopted = cast(PsOptimizer, given)
    try:
        for name in _OF_TORCH:
            vars(adopted).pop(name, None)
        adopted._attach(session, declaration, style, reconnect_timeout_seconds)
    except BaseException:
        given.__class__ = before
        vars(given).clear()
        vars(given).update(attributes)
        del given.param_groups[groups:]
        raise
    return adopted, adopted._model


def check_style(style: Style, declaration: Declaration) -> None:
    """Raises ConfigError for overlap with tables."""
    if style.overlap and declaration.tables.specs:
        raise ConfigError(
            "overlap=True is not possible with tables",
            actual=", ".join(table.name for table in declaration.tables.specs),
            remedy="leave it out, and look rows up ahead with cluster.prefetch(...)",
        )
