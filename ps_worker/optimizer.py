"""The optimizer of the user: torch's interface to optimizers that run on the shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from operator import is_
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.optim import optimizer as torch_optimizer

from ps_protocol.cluster.answers import Outcome
from ps_protocol.errors import UnsupportedOptimizer
from ps_protocol.model.spec import Options
from ps_protocol.wire.convert.options import changed_options
from ps_worker.added_groups import (
    ClosedModel,
    find_parameter,
    load_residuals,
    load_together,
    save_together,
    step_together,
    summary_of,
)
from ps_worker.model.declare import Declaration, group_options, is_immutable
from ps_worker.model.remote_state import StateOnShards
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel, StepOptions
from ps_worker.step.summary import StepSettings, StepSummary, checked_weight
from ps_worker.tables.binding import TableBinding
from ps_worker.tables.groups import TableGroups

T = TypeVar("T")


def _outside_graphs(call: T) -> T:
    """``call``, which torch.compile neither looks into nor takes into a graph, as with torch.compiler.disable.

    That itself would import a second of code. Both marks are private to torch; without them it looks into ``call``.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(call.__code__, skip)  # type: ignore[attr-defined]
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "an optimizer of torch-ps exchanges values with shards, which is no part of a graph; compile the model and the "
        "loss, or the whole step without fullgraph=True"
    )
    return call


def _without_gradients(step: Callable[..., float | None]) -> Callable[..., float | None]:
    """``step`` without recording gradients. torch's wrapper, which takes long, is used where it has something to do."""
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    record_gradients = torch._C._set_grad_enabled

    @wraps(step)
    def wrapper(optimizer: PsOptimizer, *args: Any, **kwargs: Any) -> float | None:
        # Whether something is called at each step, or a profiler looks.
        has_hooks = (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        )
        chosen = hooked if has_hooks else step
        if not torch.is_grad_enabled():
            return chosen(optimizer, *args, **kwargs)
        record_gradients(False)
        try:
            return chosen(optimizer, *args, **kwargs)
        finally:
            record_gradients(True)

    wrapper.hooked = True  # type: ignore[attr-defined]
    return _outside_graphs(wrapper)


class PsOptimizer(torch.optim.Optimizer):
    """A ``torch.optim`` optimizer that runs on the shards. ``Cluster.optimizer`` makes it; used from one thread.

    ``step`` pushes every ``param.grad`` and writes the next parameters into the model, in place. Parameter groups,
    learning-rate schedulers, ``GradScaler``, ``clip_grad_norm_`` and gradient accumulation work as with the torch
    class, of which it is an instance, too; no code of that class runs here.

    Each table has a group at the end, with the options of its row optimizer and its name under "table". The parameters
    of such a group are the rows that have gradients since the last step; ``step`` pushes these and forgets them.
    ``state_dict`` has the options of tables; rows and their state are in the checkpoints of the job alone.
    """

    #: The class that shards run; set by ``ps_worker.on_shards``.
    _torch_class: type[torch.optim.Optimizer]
    _sealed = False
    #: Declares a group that is added later, under a name of its own; set by what made the optimizer.
    _declare_group: Callable[[dict[str, Any], str], PsOptimizer]
    #: Waits for all workers and ends the use of models, which may release them; set as ``_declare_group``.
    _end_use: Callable[[list[RemoteModel], bool], None]

    def __init__(
        self, session: Session, declaration: Declaration, style: StepSettings, reconnect_timeout_seconds: float
    ) -> None:
        """Raises as ``_attach``."""
        torch.optim.Optimizer.__init__(self, declaration.groups, declaration.defaults)
        self._attach(session, declaration, style, reconnect_timeout_seconds)

    def _attach(
        self, session: Session, declaration: Declaration, style: StepSettings, reconnect_timeout_seconds: float
    ) -> None:
        """Declare the model of the present groups, and return when it has the job's parameters; called once.

        Raises PsError: ModelMismatch when another worker declared this model differently, Unavailable, Fenced.
        """
        #: For each group that was added later, the optimizer of its model.
        self._added: list[PsOptimizer] = []
        # torch's hooks around ``step`` are a matter of the class.
        self._patch_step_function()
        tables = TableBinding(declaration.tables, lambda: self._model.pipeline, trains=True)
        self._table_groups = TableGroups(self, tables)
        self._sealed = True
        self.state = StateOnShards(self._read_state)
        self._session = session
        self._rank = session.rank
        #: Names of the options of each group.
        self._accepted = [set(options) for options in declaration.spec.group_options]
        self._accepted += [set(table.options) for table in declaration.spec.tables]
        #: The values that options were read from last; None: they may change in place.
        self._option_values: list[object] | None = None
        self._sent_options: tuple[list[Options], tuple[Options, ...]] = [], ()
        self._declared = declaration.spec.group_options
        #: Groups of the first model, with those of tables.
        self._first_groups = len(self._accepted)
        self._step_options = StepOptions((), ())
        self._model = RemoteModel(session, declaration, tables, style, self._options, reconnect_timeout_seconds)

    @property
    def name(self) -> str:
        """Name of the model in the job."""
        return self._model.name

    @property
    def version(self) -> int:
        """Updates that the parameters of this worker contain: those that every shard has applied."""
        return self._model.pipeline.version

    @property
    def clip_grad_norm(self) -> float | None:
        """Norm to which the shards clip gradients; None: they do not clip."""
        return self._model.spec.clip_grad_norm or None

    @property
    def last(self) -> StepSummary | None:
        """Result of the last step; None before the first."""
        return summary_of(self._models()) if self._added else self._model.last

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of NaN or infinity (``nonfinite="skip"``)."""
        return self.last is not None and self.last.outcome is Outcome.SKIPPED

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Accelerate asks before it wraps an optimizer. Its wrapper reads and writes all state once; without a wrapper
        # it steps for each batch of an accumulation.
        raise UnsupportedOptimizer(
            "accelerate.Accelerator cannot prepare an optimizer of the cluster",
            expected="ps_worker.huggingface.PsAccelerator, or PsTrainer",
            actual="accelerate.Accelerator",
            remedy="from ps_worker.huggingface import PsAccelerator as Accelerator",
        )

    @_without_gradients
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, weight: float | None = None
    ) -> float | None:
        """Push the gradients, of rows too, and receive the next parameters.

        Values that the script has set since the last step (``load_state_dict``, a clamp) become the job's before this
        step is applied, as the argument ``writes`` of ``Cluster.optimizer`` says. With ``overlap``, errors of an
        exchange are raised by the next call, and ``last`` is the result of the step before.

        Args:
            closure: Computes the loss, as in torch.
            weight: sync: weight of these gradients in the mean of the step, such as the number of samples in the batch.
                None: 1. In async and ssp it has no effect: a push is applied alone.

        Returns:
            What ``closure`` returned.

        Raises:
            NonFiniteGradient: A gradient holds NaN or infinity, and the policy is "refuse"; nothing was sent.
            InvalidRequest: ``weight`` is not positive and finite, and nothing was sent; or values were set, and updates
                of other workers would be lost.
            Unavailable: A shard did not answer in time.
            StateLost: A shard has lost updates that were acknowledged.
            Fenced: This process has lost its place in the job.
        """
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        checked = checked_weight(weight) if weight is not None else 0.0
        # On all shards or on none: SIGTERM waits for the end of the step.
        termination = self._session.termination
        termination.sections += 1
        try:
            if self._added:
                step_together(self._models(), checked)
            else:
                self._model.step(checked)
            self._session.stepped += 1
        finally:
            termination.sections -= 1
            if termination.waits:
                termination.end_section()
        return loss

    # Schedulers of torch wrap ``step`` to see that it is called before theirs; this one reports it by itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def finish(self) -> None:
        """With ``overlap``: wait for the exchange under way and take its parameters. Without it, do nothing.

        Raises:
            PsError: The error of that step, as from ``step``.
        """
        for model in self._models():
            model.finish()

    @_outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients of rows are dropped.

        Args:
            set_to_none: False keeps gradients in the memory that pushes are sent from, which saves a copy. With
                ``overlap`` they are other tensors then, and after ``step``, unless somebody else refers to them.
        """
        for model in self._models():
            model.drop_gradients(in_place=not set_to_none)
        super().zero_grad(set_to_none)

    def pull(self) -> None:
        """Take the newest parameters and buffers of the job, for evaluation. Values set since the last step are
        replaced.

        Raises:
            PsError: A shard did not answer in time, or refused.
        """
        for model in self._models():
            model.pull()

    def assign(self) -> None:
        """Make this worker's parameters and buffers the job's, in any mode.

        Call it on one worker, then ``cluster.barrier()`` on all; after that all workers have them. Updates that other
        workers have pushed meanwhile are replaced. The state of the optimizer stays; ``load_state_dict`` sets it.

        Raises:
            PsError: A shard did not answer in time, or refused.
        """
        for model in self._models():
            model.assign()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state from the shards, in the form of ``torch_class(...).state_dict()``.

        Of tables it has only the options.

        Raises:
            PsError: A shard did not answer in time, or refused.
        """
        state, residuals = save_together(self._models(), self._rank)
        parameters = self._parameters()
        self.state = defaultdict(dict, {parameters[number]: dict(values) for number, values in state.items()})
        try:
            with self._table_groups.without_rows(self):
                saved = super().state_dict()
        finally:
            self.state = StateOnShards(self._read_state)
        return {**saved, **residuals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state from a ``state_dict`` of this optimizer or of the torch class.

        All workers may call it; call ``cluster.barrier()`` afterwards. The worker of the lowest rank sends the state to
        the shards, unless it joined a job that had begun to train and has made no step: then the shards keep their
        state.

        Args:
            state_dict: The state. One without tables leaves their options as they are.

        Raises:
            ValueError: The groups differ, as in torch.
            InvalidRequest: The state does not fit the parameters.
        """
        self.finish()
        with self._table_groups.without_rows(self):
            super().load_state_dict(self._table_groups.completed(self, state_dict))
        load_residuals(self._models(), state_dict, self._rank)
        parameters = self._parameters()
        state = {number: self.state[p] for number, p in enumerate(parameters) if p in self.state}
        self.state = StateOnShards(self._read_state)
        load_together(self._models(), state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that no optimizer has yet: as another model of the job, which is stepped with the first.

        Every worker adds the same groups in the same order. The call waits as ``cluster.barrier()`` does, except on a
        worker that joins a job which has the group already. After an error nothing is added.

        Args:
            param_group: As in torch.

        Raises:
            ValueError: The group is not valid, as in torch.
            UnsupportedOptimizer: The model has tables.
            ModelMismatch: Another worker adds other parameters.
        """
        if not self._sealed:
            super().add_param_group(param_group)
            return
        if self._first_groups > len(self._declared):
            raise UnsupportedOptimizer(
                "a model with tables cannot get more parameter groups",
                remedy="give all parameters to cluster.optimizer, frozen with requires_grad=False until needed",
            )
        self.finish()
        super().add_param_group(param_group)
        try:
            self._added.append(self._declare_group(self.param_groups[-1], f"{self.name}+{len(self._added) + 1}"))
        except BaseException:
            self.param_groups.pop()
            raise

    def close(self, *, release: bool = False) -> None:
        """End the use of the model: its parameters keep their last values and may be given to another optimizer.

        Waits as ``cluster.barrier()`` does: every live worker calls it, and steps the model no more. Afterwards every
        other call raises UnsupportedOptimizer; closing again does nothing.

        Args:
            release: Have the shards drop the values, state and tables of the model. The next checkpoint lacks it, and
                its name is free. Otherwise the shards keep it until the job ends, and its name stays taken.

        Raises:
            NotReady: Other workers have not closed it in time; the message names them. Call it again.
            PsError: A shard did not answer in time, or refused.
        """
        if isinstance(self._model, ClosedModel):
            return
        self.finish()
        self._end_use(self._models(), release)
        self._model = cast(RemoteModel, ClosedModel(self.name))
        self._added = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        # ``load_state_dict`` ends here. The list stays the same one: schedulers and other optimizers may share it.
        groups = self.param_groups
        torch.optim.Optimizer.__setstate__(self, state)
        groups[:] = self.param_groups
        self.param_groups = groups
        for added, group in zip(self._added, groups[self._first_groups :], strict=True):
            added.param_groups[:] = [group]

    def __getstate__(self) -> NoReturn:
        raise UnsupportedOptimizer(
            "an optimizer that runs on shards can be neither copied nor pickled",
            remedy="use state_dict(), and call cluster.optimizer(...) in each process",
        )

    def __repr__(self) -> str:
        groups, name = super().__repr__().removeprefix(type(self).__name__), self._torch_class.__name__
        if isinstance(self._model, ClosedModel):
            return f"{name}, closed{groups}"
        shards = len(self._model.holders)
        return f"{name} on {shards} shard{'s' if shards > 1 else ''}{groups}"

    def _options(self) -> StepOptions:
        """The options of the next step that are not as declared; the same object until one is set."""
        own = self.param_groups[: self._first_groups] if self._added else self.param_groups
        values: list[object] = []
        for group, accepted in zip(own, self._accepted, strict=True):
            values += map(group.get, accepted)
        if self._option_values is not None and all(map(is_, values, self._option_values)):
            return self._step_options
        self._option_values = values if all(map(is_immutable, values)) else None
        groups = zip(self._table_groups.others(own), self._accepted, strict=False)
        options = [group_options(group, accepted) for group, accepted in groups]
        if options != self._sent_options[0]:
            self._sent_options = options, tuple(map(changed_options, self._declared, options))
        self._step_options = StepOptions(self._sent_options[1], self._table_groups.options(own))
        return self._step_options

    def _read_state(self, parameter: torch.Tensor) -> Mapping[str, Any] | None:
        found = find_parameter(self._models(), parameter)
        return None if found is None else found[0].read_state(found[1])

    def _models(self) -> list[RemoteModel]:
        return [self._model, *(added._model for added in self._added)]

    def _parameters(self) -> list[torch.Tensor]:
        return [p for model in self._models() for p in model.parameters]
