"""Optimizer classes of your own on the shards: ``register`` admits a class, ``check`` tests it against the contract."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ps_protocol.errors import ConfigError
from ps_protocol.model.registered_optimizers import register
from ps_protocol.model.spec import DType

__all__ = ["check", "register"]

_CONTRACT = "ps_server.optimizers.contract"
"""Loaded by name: it runs the optimizer as a shard does, with the code of the shard, and only tests call it."""


def check(
    torch_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    """Check that shards can run an optimizer class: for the tests of its author.

        def test_lion_runs_on_shards():
            ps_worker.optimizers.check(Lion, {"lr": 0.01})

    The class trains a few small variables for six steps, some without gradients in some steps, as a shard would run
    it. The steps have to equal those of the class in one process; to be repeated bit for bit; to go on from a copy of
    values and state; and, of an element-wise class, to be the same on parts of variables.

    Args:
        torch_class: A registered class, or one of ``torch.optim``.
        options: Arguments of its constructor by name, with ``lr``.
        shapes: Shapes of the variables, for a class that accepts only some. None: scalars to three axes.
        dtype: Dtype of the variables.
        seed: Seed of values and gradients.

    Raises:
        UnsupportedOptimizer: The class is not registered, or breaks the contract; the message names the check.
        ConfigError: The server part of torch-ps cannot be imported, or shards know no such dtype.
    """
    try:
        contract = importlib.import_module(_CONTRACT)
    except ImportError as error:
        raise ConfigError(
            "optimizers are checked with the code of the shards, which cannot be imported",
            actual=str(error),
            remedy="pip install 'torch-ps[server]'",
        ) from error
    given = {} if shapes is None else {"shapes": shapes}
    contract.Contract(torch_class, options, **given, dtype=_dtype(dtype), seed=seed).check()


def _dtype(dtype: torch.dtype) -> DType:
    name = str(dtype).removeprefix("torch.")
    try:
        return DType(name)
    except ValueError:
        known = ", ".join(each.value for each in DType)
        raise ConfigError("no shard keeps variables of this dtype", expected=known, actual=name) from None
