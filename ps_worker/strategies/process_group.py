"""Which replica a process is, and the process group of all replicas: opened, used for values, and closed here."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ps_protocol import times
from ps_protocol.cluster.replicas import STORE_VARIABLE
from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.errors import ConfigError, ModelMismatch, Unavailable
from ps_protocol.text import whole_number

COMMUNICATIONS = ("auto", "gloo", "nccl")

_COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


_LOST = "a replica was lost, or did not come to the same exchange"


@dataclass(frozen=True, slots=True)
class Placement:
    """Replica ``rank`` of ``replicas``; on its host ``local_rank`` of ``local_replicas``."""

    rank: int = 0
    replicas: int = 1
    local_rank: int = 0
    local_replicas: int = 1
    #: As ``torch.distributed.init_process_group`` takes it; empty: there is one replica.
    rendezvous: str = ""


def placement(environ: Mapping[str, str]) -> Placement:
    """The placement of this process; one replica if ``environ`` names none. Raises ConfigError naming the fault."""
    if environ.get("TF_CONFIG"):
        return _of_tf_config(TfConfig.parse(environ["TF_CONFIG"], needs_ps=False))
    if not environ.get("WORLD_SIZE") or not environ.get("RANK"):
        return Placement()
    rank, replicas = _count("RANK", environ), _count("WORLD_SIZE", environ)
    local_rank = _count("LOCAL_RANK", environ, rank)
    local_replicas = _count("LOCAL_WORLD_SIZE", environ, replicas)
    if rank >= replicas or local_rank >= local_replicas or local_replicas > replicas:
        raise ConfigError(
            "the variables of this replica do not fit together",
            expected="RANK below WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE",
            actual=", ".join(f"{name}={environ.get(name, '')}" for name in _COUNTS),
            remedy="start the script with ps-run --strategy or torchrun, which set them",
        )
    if replicas == 1:
        return Placement()
    return Placement(rank, replicas, local_rank, local_replicas, _rendezvous(environ))


def _rendezvous(environ: Mapping[str, str]) -> str:
    if environ.get(STORE_VARIABLE):
        return f"file://{environ[STORE_VARIABLE]}"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ConfigError(
                f"{name} is not set: the replicas cannot find each other",
                remedy="start the script with ps-run --strategy or torchrun, which set it",
            )
    return "env://"


def _count(name: str, environ: Mapping[str, str], default: int = 0) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if (count := whole_number(text)) is None:
        raise ConfigError(
            f"{name} is not a whole number from 0",
            actual=repr(text),
            remedy="start the script with ps-run --strategy or torchrun, which set it",
        )
    return count


def _of_tf_config(tf: TfConfig) -> Placement:
    """A chief is worker 0, as in TensorFlow; the first of them listens at its address."""
    if tf.cluster.get("ps") or tf.task_type not in ("chief", "worker"):
        raise ConfigError(
            "this TF_CONFIG is not of a data-parallel job",
            expected="a cluster of workers without ps, and a task that is a worker or the chief",
            actual=f"task {tf.task_type} of a cluster of {', '.join(sorted(tf.cluster))}",
            remedy="use the strategy parameter_server, which has shards and evaluators",
        )
    members = [*tf.cluster.get("chief", ()), *tf.cluster.get("worker", ())]
    rank = tf.task_index + (len(tf.cluster.get("chief", ())) if tf.task_type == "worker" else 0)
    if len(members) == 1:
        return Placement()
    host = members[rank].rpartition(":")[0]
    local = [number for number, address in enumerate(members) if address.rpartition(":")[0] == host]
    return Placement(rank, len(members), local.index(rank), len(local), f"tcp://{members[0]}")


def backend_for(communication: str, device: torch.device) -> str:
    """The backend of torch.distributed. Raises ConfigError for one that is not known or cannot run here."""
    if communication not in COMMUNICATIONS:
        raise ConfigError("unknown communication", expected=", ".join(COMMUNICATIONS), actual=communication)
    if not dist.is_available():
        raise ConfigError("this torch has no torch.distributed", remedy="install a build of torch that has it")
    if communication == "auto":
        if device.type == "cuda":
            return "nccl" if dist.is_nccl_available() else "gloo"
        return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    if communication == "nccl" and device.type != "cuda":
        raise ConfigError(
            "nccl moves data between GPUs", expected="a cuda device", actual=str(device), remedy="use gloo, or auto"
        )
    available = dist.is_nccl_available() if communication == "nccl" else dist.is_gloo_available()
    if not available:
        raise ConfigError(
            f"this torch has no {communication}", remedy="use another communication, or another build of torch"
        )
    return communication


class ProcessGroup:
    """All replicas of the job; one alone has no group and exchanges nothing. Used from the training thread."""

    def __init__(self, place: Placement, backend: str, timeout_seconds: float = times.LONG_PATIENCE_SECONDS) -> None:
        """Wait for all replicas. A group that the script has opened is used and left open. Raises Unavailable."""
        self.place = place
        self._owned = bool(place.rendezvous) and not dist.is_initialized()
        if self._owned:
            with lost_replicas("the replicas did not find each other", every=True):
                dist.init_process_group(
                    backend,
                    init_method=place.rendezvous,
                    rank=place.rank,
                    world_size=place.replicas,
                    timeout=timedelta(seconds=timeout_seconds),
                )
            # Kept until the interpreter ends. The destructor, which DistributedDataParallel's may call with the
            # interpreter's lock, joins gloo's thread, and that needs the lock to drop an exchange: after one that
            # failed they would wait for each other for ever.
            atexit.register(id, dist.group.WORLD)

    @property
    def alone(self) -> bool:
        """Whether there is no other replica."""
        return self.place.replicas == 1

    def all_reduce(self, how: str, tensor: Tensor) -> Tensor:
        """The sum or mean over all replicas, on all of them. Raises Unavailable."""
        total = tensor.clone()
        with lost_replicas():
            dist.all_reduce(total)
        return total / self.place.replicas if how == "mean" else total

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all replicas by rank; first dimensions may differ. Raises Unavailable, ModelMismatch."""
        shapes = self._gather_objects(tuple(tensor.shape))
        if len({len(shape) for shape in shapes}) > 1:
            raise ModelMismatch("gather() got tensors with different numbers of dimensions")
        if len({shape[1:] for shape in shapes}) > 1:
            raise ModelMismatch(
                "gather() got tensors that differ beyond their first dimension", actual=", ".join(map(str, shapes))
            )
        # Backends gather tensors of one shape.
        longest = max(shape[0] for shape in shapes)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in shapes]
        with lost_replicas():
            dist.all_gather(parts, padded)
        return [part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)]

    def common_seed(self) -> int:
        """Replica 0's torch seed, on all of them. Raises Unavailable."""
        seed = torch.initial_seed() % 2**62
        return seed if self.alone else int(self._gather_objects(seed)[0])

    def verify_order(self, digest: bytes) -> None:
        """Raises ModelMismatch where the replicas have different orders of samples; Unavailable."""
        found = set(self._gather_objects(digest))
        if len(found) > 1:
            raise ModelMismatch(
                "the sampler yields another order on each replica: samples would be used twice and others never",
                expected="the same order everywhere",
                actual=f"{len(found)} different orders on {self.place.replicas} replicas",
                remedy="seed the sampler alike, such as with a torch.Generator and the epoch's number",
            )

    def barrier(self) -> None:
        """Wait for all replicas. Raises Unavailable."""
        if not self.alone:
            with lost_replicas():
                dist.barrier()

    def close(self) -> None:
        """Close the group where it was opened here. Safe to repeat."""
        if self._owned and dist.is_initialized():
            self._owned = False
            dist.destroy_process_group()

    def _gather_objects(self, value: Any) -> list[Any]:
        """A small value of every replica, by rank. Raises Unavailable."""
        found: list[Any] = [None] * self.place.replicas
        with lost_replicas():
            dist.all_gather_object(found, value)
        return found


@contextmanager
def lost_replicas(message: str = _LOST, *, every: bool = False) -> Iterator[None]:
    """Errors of torch.distributed as Unavailable; with ``every`` all that torch raises there."""
    try:
        yield
    except RuntimeError as error:
        if not every and not is_lost(error):
            raise
        raise Unavailable(
            f"{message}: {str(error).splitlines()[0][:200]}",
            remedy="see which replica ended first, and why; mirrored training needs all of them. Start the job again "
            "from its last checkpoint, or use the strategy parameter_server, which goes on without a worker",
        ) from error


def is_lost(error: RuntimeError) -> bool:
    """Whether ``error`` is one of connections between replicas."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection closed by peer", "connection reset", "rendezvous"))
