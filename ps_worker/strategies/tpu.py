"""The strategy tpu: replicas on TPU cores, by torch's own device "tpu" or by torch_xla."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from ps_protocol.errors import ConfigError
from ps_worker.strategies.base import Strategy
from ps_worker.strategies.data_parallel import DataParallel
from ps_worker.strategies.process_group import Placement


class TpuReplicas(DataParallel):
    """Replicas on torch's device "tpu", a process per core; torch's own default backend connects them."""

    name = "tpu"

    def _device_of(self, place: Placement, devices: int | str | Sequence[str] | None) -> torch.device:
        return torch.device("tpu", place.local_rank)


def accelerator() -> str:
    """The type of torch's accelerator on this machine; empty: none."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return found.type if found is not None else ""


def Tpu(**options: Any) -> Strategy:  # noqa: N802 -- stands for the class of the strategy that can run here
    """The strategy for the TPU of this machine. Raises ConfigError where there is none."""
    if accelerator() == "tpu":
        return TpuReplicas(**options)
    if importlib.util.find_spec("torch_xla") is not None:
        from ps_worker.strategies.xla import XlaReplicas

        return XlaReplicas(**options)
    raise ConfigError(
        "this machine has no TPU that torch knows",
        expected='torch.accelerator of type "tpu", or torch_xla for this release of torch',
        actual=f"torch {torch.__version__}, accelerator {accelerator() or 'none'}",
        remedy="install the TPU support of this torch on a machine with TPUs, or use the strategy mirrored",
    )
