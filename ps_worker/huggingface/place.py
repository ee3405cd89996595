"""A worker's rank and the number of workers, where accelerate and transformers look for them."""

from __future__ import annotations

import atexit
import os
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType

from ps_protocol.errors import ConfigError
from ps_worker.cluster import Cluster
from ps_worker.connection import connect

_joined: dict[int, Cluster] = {}
"""The connection of this process, by its number, which all its trainers and accelerators share."""


def connected() -> Cluster:
    """Join the job from the environment, once, and leave it when the process ends. Raises what ``connect`` raises."""
    cluster = _joined.get(os.getpid())
    if cluster is None or cluster._left:
        cluster = _joined[os.getpid()] = connect()
        cluster.__enter__()
        atexit.register(_leave, cluster)
    return cluster


def take_place(cluster: Cluster) -> None:
    """Have accelerate report the rank, the number of workers and the device of ``cluster``.

    Accelerate keeps them in one object per process, which it shares with ``TrainingArguments``. The kind of
    distribution stays "none", so that neither of them opens torch.distributed. Raises ConfigError where it is open.
    """
    if not PartialState._shared_state and int(os.environ.get("LOCAL_RANK", -1)) >= 0:
        raise _distributed("LOCAL_RANK is set, which has accelerate open torch.distributed")
    state = PartialState()
    if state.distributed_type is not DistributedType.NO:
        raise _distributed(f"accelerate has opened torch.distributed ({state.distributed_type.value})")
    state.num_processes = cluster.world_size
    state.process_index = state.local_process_index = cluster.rank
    state.device = cluster.device


def check_precision(cluster: Cluster, precision: object) -> None:
    """Raises ConfigError for mixed precision with fp16 on the CPU: accelerate would compute in full precision there."""
    asked = precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(asked) == "fp16" and cluster.device.type == "cpu":
        raise ConfigError(
            "accelerate has no mixed precision with fp16 on the CPU",
            expected="a GPU, or another precision",
            actual="fp16 on the device cpu",
            remedy="use bf16, which needs no scaled gradients, or PS_DEVICE=cuda where there is a GPU",
        )


def _distributed(what: str) -> ConfigError:
    return ConfigError(
        what,
        expected="workers of torch-ps alone: they exchange gradients through the shards",
        actual="two kinds of distribution",
        remedy="start the script with ps-run, not with torchrun or accelerate launch",
    )


def _leave(cluster: Cluster) -> None:
    # What Python reported as uncaught ended the script.
    error = getattr(sys, "last_value", None)
    cluster.__exit__(type(error) if error else None, error, None)
