"""Refuses modules and tensors that another library has sharded, flattened or wrapped."""

from __future__ import annotations

import torch

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_worker.tables.table import INNER_MODULE

_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"})
"""Classes that exchange gradients or parameters between processes by themselves."""


def plain_module(module: torch.nn.Module) -> torch.nn.Module:
    """``module``, or the module that ``torch.compile`` wraps, whose parameter names are the model's.

    Raises UnsupportedOptimizer if another library exchanges the module's values between processes.
    """
    if wrapper := _WRAPPERS.intersection(each.__name__ for each in type(module).__mro__):
        raise UnsupportedOptimizer(
            f"the model is wrapped in {min(wrapper)}, which exchanges it between processes by itself",
            expected="the model without a wrapper",
            actual=type(module).__name__,
            remedy="leave the wrapper out, or give the model inside it: the cluster averages gradients",
        )
    inside = getattr(module, INNER_MODULE, None)
    return plain_module(inside) if isinstance(inside, torch.nn.Module) else module


def check_plain(name: str, tensor: torch.Tensor, *, otherwise: str = "") -> None:
    """Raises InvalidRequest for a tensor whose values are not in its own memory; the error names their owner.

    Libraries are recognised by marks on the tensor: importing them takes longer than declaring a model.
    ``otherwise`` replaces the remedy.
    """
    own = type(tensor)
    kinds = {each.__name__ for each in own.__mro__}
    if "DTensor" in kinds:
        what = "is a DTensor: FSDP2 or tensor parallelism has split it over processes"
        remedy = "leave fully_shard(...) and parallelize_module(...) out: the cluster's shards hold the parts"
    elif "FlatParameter" in kinds or getattr(tensor, "_fsdp_flattened", False):
        what = "belongs to FullyShardedDataParallel, which keeps its values in a flat parameter of its own"
        remedy = "give cluster.optimizer the model without the FSDP wrapper: the cluster's shards hold the parts"
    elif _is_subclass(own):
        what = "is of a tensor subclass, whose values may be anywhere"
        remedy = "replace it by nn.Parameter(p.detach().as_subclass(torch.Tensor)), or leave it out"
    else:
        return
    raise InvalidRequest(
        f"'{name}' {what}",
        variable=name,
        expected="a torch.Tensor or nn.Parameter",
        actual=f"{own.__module__}.{own.__qualname__}",
        remedy=otherwise or remedy,
    )


def _is_subclass(own: type[torch.Tensor]) -> bool:
    """Whether the class overrides operations; a subclass of Parameter may leave them as they are."""
    dispatches = own.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    wraps = own is not torch.Tensor and own.__torch_function__ is not torch.nn.Parameter.__torch_function__
    return dispatches or wraps
