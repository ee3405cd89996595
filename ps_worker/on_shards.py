"""Makes optimizers that run on the shards: of a class and a model, of one that is built, and for groups added later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.model.spec import Buffers
from ps_protocol.times import PATIENCE_SECONDS
from ps_worker.model.bindings import Source
from ps_worker.model.built_optimizer import (
    check_built,
    constructor_arguments,
    group_to_declare,
    groups_to_declare,
    has_scheduler,
    state_of,
)
from ps_worker.model.declare import BufferPolicy, Declaration, build_spec
from ps_worker.model.plain import plain_module
from ps_worker.optimizer import PsOptimizer
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.summary import PLAIN, StepSettings
from ps_worker.trained_models import TrainedModels
from ps_worker.trained_models import end_use as end_model_use


def on_shards(torch_class: type[torch.optim.Optimizer]) -> type[PsOptimizer]:
    """Return the class of optimizers that run ``torch_class`` on shards: a PsOptimizer and a ``torch_class``."""
    members = {"_torch_class": torch_class, "__doc__": PsOptimizer.__doc__, "__module__": PsOptimizer.__module__}
    return cast(type[PsOptimizer], type(torch_class.__name__, (PsOptimizer, torch_class), members))


def declare_optimizer(
    session: Session,
    torch_class: type[torch.optim.Optimizer],
    source: Source,
    arguments: Mapping[str, Any],
    *,
    name: str,
    nonfinite: str = "refuse",
    buffers: BufferPolicy = "rank0",
    style: StepSettings = PLAIN,
    tables: Iterable[object] = (),
    module: torch.nn.Module | None = None,
    models: TrainedModels | None = None,
    clip_grad_norm: float | None = None,
    stale: str | None = None,
    reconnect_timeout_seconds: float = PATIENCE_SECONDS,
) -> tuple[PsOptimizer, RemoteModel]:
    """Return the optimizer for the script, and its model. Raises what ``build_spec`` and PsOptimizer raise.

    ``models``: those of the cluster; groups that are added later join them.
    """
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
        held=models.held if models is not None else {},
        clip_grad_norm=clip_grad_norm,
        stale=stale,
    )
    check_style(style, declaration)
    optimizer = on_shards(torch_class)(session, declaration, style, reconnect_timeout_seconds)
    model = optimizer._model
    if not isinstance(source, torch.nn.Module) and module is None and declaration.spec.buffers is not Buffers.LOCAL:
        model.watch_stray_buffers()
    let_grow(optimizer, session, source if isinstance(source, torch.nn.Module) else module, style, models)
    return optimizer, model


def let_grow(
    optimizer: PsOptimizer,
    session: Session,
    module: torch.nn.Module | None,
    style: StepSettings,
    models: TrainedModels | None,
) -> None:
    """Let ``optimizer`` declare groups that are added to it, and end the use of its models.

    Each added group is a model of its own, with the names of ``module``.
    """

    def declare_group(group: dict[str, Any], name: str) -> PsOptimizer:
        torch_class, first = optimizer._torch_class, optimizer._model
        if first.spec.clip_grad_norm:
            raise UnsupportedOptimizer(
                "a group cannot be added where gradients are clipped together: it would have a norm of its own",
                expected="all groups at once, those of later with requires_grad=False",
                actual=f"clip_grad_norm={first.spec.clip_grad_norm:g}",
                remedy="give them to cluster.optimizer(...) at once, or clip with torch.nn.utils.clip_grad_norm_",
            )
        declaration = build_spec(
            torch_class,
            [group_to_declare(group, optimizer.defaults)],
            constructor_arguments(torch_class, optimizer.defaults),
            name=name if models is None else models.free_name(name),
            nonfinite=first.spec.nonfinite.value,
            buffers=Buffers.LOCAL.value,
            module=module,
            held=models.held if models is not None else {},
            stale=first.spec.stale,
        )
        if models is not None and not session.is_declared(name):
            # A worker that added it and steps would wait for those that have not, and they for its other steps.
            models.meet()
        added = on_shards(torch_class)(session, declaration, style, first.pipeline.reconnect_timeout_seconds)
        added.param_groups[:] = [group]
        if models is not None:
            models.add(added._model)
        return added

    def end_use(ended: list[RemoteModel], release: bool) -> None:
        if models is not None:
            models.end_use(ended, release=release)
            return
        for model in ended:
            end_model_use(session, model, release=release)

    optimizer._declare_group, optimizer._end_use = declare_group, end_use


def check_style(style: StepSettings, declaration: Declaration) -> None:
    """Raise ConfigError for overlap with tables."""
    if style.overlap and declaration.tables.specs:
        raise ConfigError(
            "overlap=True is not possible with tables",
            actual=", ".join(table.name for table in declaration.tables.specs),
            remedy="leave it out, and look rows up ahead with cluster.prefetch(...)",
        )


_OF_TORCH = ("step", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes of an instance about how torch runs its step: the wrapper of a scheduler, and how it is fused."""


def adopt_optimizer(
    session: Session,
    given: object,
    module: torch.nn.Module,
    schedulers: Iterable[object] = (),
    *,
    name: str,
    nonfinite: str = "refuse",
    buffers: BufferPolicy = "rank0",
    style: StepSettings = PLAIN,
    tables: Iterable[object] = (),
    models: TrainedModels | None = None,
    clip_grad_norm: float | None = None,
    stale: str | None = None,
    reconnect_timeout_seconds: float = PATIENCE_SECONDS,
) -> tuple[PsOptimizer, RemoteModel]:
    """Return ``given`` itself, which runs on the shards from now on, and its model.

    After an error ``given`` is as it was. Raises what ``check_built``, ``build_spec`` and ``PsOptimizer`` raise,
    UnsupportedOptimizer for one that was adopted before.
    """
    if isinstance(given, PsOptimizer):
        raise UnsupportedOptimizer(
            f"this optimizer runs on the shards already, as that of model '{given.name}'",
            expected="an optimizer of torch",
            actual="one of the cluster",
            remedy="use it as it is",
        )
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            "adopt() takes the model whose parameters the optimizer has",
            expected="an nn.Module",
            actual=type(module).__name__,
            remedy="call cluster.adopt(optimizer, model)",
        )
    module = plain_module(module)
    optimizer = check_built(given, module, schedulers)
    declaration = build_spec(
        type(optimizer),
        groups_to_declare(optimizer),
        constructor_arguments(type(optimizer), optimizer.defaults),
        name=name,
        nonfinite=nonfinite,
        buffers=buffers,
        tables=tables,
        seed=lambda: session.seed,
        module=module,
        held=models.held if models is not None else {},
        clip_grad_norm=clip_grad_norm,
        stale=stale,
    )
    check_style(style, declaration)
    _check_tables(declaration, scheduled=has_scheduler(optimizer) or any(True for _ in schedulers))
    declaration = replace(declaration, state=state_of(optimizer))
    adopted = _taken_over(optimizer, session, declaration, style, reconnect_timeout_seconds)
    let_grow(adopted, session, module, style, models)
    return adopted, adopted._model


def _taken_over(
    given: torch.optim.Optimizer,
    session: Session,
    declaration: Declaration,
    style: StepSettings,
    reconnect_timeout_seconds: float,
) -> PsOptimizer:
    """Turn ``given``, an optimizer of torch, into one on shards, in place: a scheduler that refers to it refers to that
    one.

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
    return adopted


def _check_tables(declaration: Declaration, *, scheduled: bool) -> None:
    if declaration.tables.specs and scheduled:
        raise ConfigError(
            "a scheduler was built on the optimizer before its tables had groups",
            expected="one learning rate for each parameter group and each table",
            actual=", ".join(table.name for table in declaration.tables.specs),
            remedy="build the scheduler after cluster.adopt(...)",
        )
