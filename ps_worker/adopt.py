"""``cluster.adopt``: a torch optimizer that the user has built becomes one that runs on the shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.times import PATIENCE_SECONDS
from ps_worker.model.built_optimizer import (
    check_built,
    constructor_arguments,
    groups_to_declare,
    has_scheduler,
    state_of,
)
from ps_worker.model.declare import BufferPolicy, Declaration, build_spec
from ps_worker.model.plain import plain_module
from ps_worker.on_shards import check_style, let_grow, on_shards
from ps_worker.optimizer import PsOptimizer
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.summary import PLAIN, Style
from ps_worker.trained_models import TrainedModels

_OF_TORCH = ("step", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes of an instance that tell how torch runs its step: the scheduler's wrapper, and how it is fused."""


def adopt_optimizer(
    session: Session,
    given: object,
    module: torch.nn.Module,
    schedulers: Iterable[object] = (),
    *,
    name: str,
    nonfinite: str = "refuse",
    buffers: BufferPolicy = "rank0",
    style: Style = PLAIN,
    tables: Iterable[object] = (),
    models: TrainedModels | None = None,
    clip_grad_norm: float | None = None,
    reconnect_timeout_seconds: float = PATIENCE_SECONDS,
) -> tuple[PsOptimizer, RemoteModel]:
    """``given`` itself, which runs on the shards from now on, and the model for the cluster.

    After an error ``given`` is as it was. Raises what ``check_built``, ``build_spec`` and ``PsOptimizer`` raise,
    UnsupportedOptimizer for one that has been adopted already.
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
    style: Style,
    reconnect_timeout_seconds: float,
) -> PsOptimizer:
    """``given``, an optimizer of torch, becomes one on shards: what holds it, such as a scheduler, holds that one.

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
