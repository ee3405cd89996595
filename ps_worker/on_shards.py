"""Makes optimizers that run on the shards: of a torch class and a model, and for groups that are added later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.model.spec import Buffers
from ps_protocol.times import PATIENCE_SECONDS
from ps_worker.model.bindings import Source
from ps_worker.model.built_optimizer import constructor_arguments, group_to_declare
from ps_worker.model.declare import BufferPolicy, Declaration, build_spec
from ps_worker.optimizer import PsOptimizer
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.summary import PLAIN, Style
from ps_worker.trained_models import TrainedModels
from ps_worker.trained_models import end_use as end_model_use


def on_shards(torch_class: type[torch.optim.Optimizer]) -> type[PsOptimizer]:
    """The class of optimizers that run ``torch_class`` on shards: a PsOptimizer that is one of ``torch_class``, too."""
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
    style: Style = PLAIN,
    tables: Iterable[object] = (),
    module: torch.nn.Module | None = None,
    models: TrainedModels | None = None,
    clip_grad_norm: float | None = None,
    reconnect_timeout_seconds: float = PATIENCE_SECONDS,
) -> tuple[PsOptimizer, RemoteModel]:
    """The optimizer for the user, and the model for the cluster. Raises what ``build_spec`` and PsOptimizer raise.

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
    style: Style,
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


def check_style(style: Style, declaration: Declaration) -> None:
    """Raises ConfigError for overlap with tables."""
    if style.overlap and declaration.tables.specs:
        raise ConfigError(
            "overlap=True is not possible with tables",
            actual=", ".join(table.name for table in declaration.tables.specs),
            remedy="leave it out, and look rows up ahead with cluster.prefetch(...)",
        )
