"""The strategies by name, also those of other packages."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from ps_protocol.cluster.replicas import STRATEGIES_GROUP, STRATEGY_VARIABLE
from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.errors import ConfigError
from ps_worker.session import uncaught
from ps_worker.strategies.base import Strategy

_FOLDER = "ps_worker.strategies"

BUILT_IN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "one_device": (f"{_FOLDER}.one_device", "OneDevice"),
        "mirrored": (f"{_FOLDER}.data_parallel", "Mirrored"),
        "multi_worker_mirrored": (f"{_FOLDER}.data_parallel", "MultiWorkerMirrored"),
        "central_storage": (f"{_FOLDER}.cluster_strategies", "CentralStorage"),
        "parameter_server": (f"{_FOLDER}.cluster_strategies", "ParameterServer"),
        "tpu": (f"{_FOLDER}.tpu", "Tpu"),
    }
)


def strategy(name: str | None = None, **options: Any) -> Strategy:
    """Return the strategy of a name; this process is a replica of it from now on.

    Args:
        name: "one_device", "mirrored", "multi_worker_mirrored", "central_storage", "parameter_server", "tpu", or the
            name of an entry point in the group ``torch_ps.strategies``. None: ``PS_STRATEGY``, which ``ps-run
            --strategy`` sets; else what the environment is made for: parameter_server with ``PS_COORDINATOR`` or a
            ``TF_CONFIG`` that has a ps, multi_worker_mirrored with another ``TF_CONFIG`` or the variables of torchrun,
            else one_device.
        **options: Arguments of the class of the strategy.

    Returns:
        The strategy, best used in a ``with`` block.

    Raises:
        ConfigError: A name or option is unknown, or this machine cannot run the strategy; nothing was started.
    """
    uncaught.install()
    name = name or chosen_name(os.environ)
    kind = _find(name)
    known = inspect.signature(kind).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
        for option in options:
            if option not in known:
                raise ConfigError(
                    f"strategy '{name}' has no option '{option}'",
                    expected=", ".join(known) or "no options",
                    actual=option,
                    remedy="leave it out, or choose a strategy that has it (docs/strategies.md)",
                )
    return kind(**options)


def chosen_name(environ: Mapping[str, str]) -> str:
    """``PS_STRATEGY``, else what the other variables are for, else one_device. Raises ConfigError for TF_CONFIG."""
    if environ.get(STRATEGY_VARIABLE):
        return environ[STRATEGY_VARIABLE]
    if environ.get("TF_CONFIG"):
        tf = TfConfig.parse(environ["TF_CONFIG"], needs_ps=False)
        return "parameter_server" if tf.cluster.get("ps") else "multi_worker_mirrored"
    if environ.get("PS_COORDINATOR"):
        return "parameter_server"
    if environ.get("WORLD_SIZE") and environ.get("RANK"):
        return "multi_worker_mirrored"
    return "one_device"


def _find(name: str) -> Callable[..., Strategy]:
    if name in BUILT_IN:
        module, kind = BUILT_IN[name]
        return getattr(importlib.import_module(module), kind)  # type: ignore[no-any-return]  # as listed above
    others = {each.name: each for each in entry_points(group=STRATEGIES_GROUP)}
    if name not in others:
        raise ConfigError(
            f"unknown strategy '{name}'",
            expected=", ".join([*BUILT_IN, *sorted(others)]),
            actual=name,
            remedy=f"correct the name, {STRATEGY_VARIABLE} or --strategy, or install the package that has it",
        )
    entry = others[name]
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(
            f"strategy '{name}' of {entry.value} cannot be imported: {error}",
            remedy="repair or uninstall the package that has it",
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise ConfigError(
            f"strategy '{name}' is not a strategy",
            expected="a subclass of ps_worker.Strategy",
            actual=entry.value,
            remedy=f"correct the entry point of group {STRATEGIES_GROUP}",
        )
    return kind
