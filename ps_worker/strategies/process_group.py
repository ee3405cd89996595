"""The process group of data-parallel replicas: opened, used for small values, and closed here."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ps_protocol import times
from ps_protocol.errors import ConfigError, ModelMismatch, Unavailable
from ps_worker.strategies.placement import Placement

COMMUNICATIONS = ("auto", "gloo", "nccl")


_LOST = "a replica was lost, or did not come to the same exchange"


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
        with lost_replicas():
            shape = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
            dimensions = torch.tensor([tensor.ndim], dtype=torch.int64, device=tensor.device)
            if len(set(self._same_size(dimensions))) > 1:
                raise ModelMismatch("gather() got tensors with different numbers of dimensions")
            shapes = self._gathered(shape)
            if len({tuple(each[1:].tolist()) for each in shapes}) > 1:
                raise ModelMismatch(
                    "gather() got tensors that differ beyond their first dimension",
                    actual=", ".join(str(tuple(each.tolist())) for each in shapes),
                )
            longest = int(max(each[0] for each in shapes))
            padded = tensor.new_zeros((longest, *tensor.shape[1:]))
            padded[: tensor.shape[0]] = tensor
            return [part[: int(each[0])] for part, each in zip(self._gathered(padded), shapes, strict=True)]

    def common_seed(self) -> int:
        """Replica 0's torch seed, on all of them. Raises Unavailable."""
        if self.alone:
            return torch.initial_seed() % 2**62
        device = self._device
        seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
        with lost_replicas():
            dist.broadcast(seed, src=0)
        return int(seed)

    def verify_order(self, digest: bytes) -> None:
        """Raises ModelMismatch where the replicas have different orders of samples; Unavailable."""
        mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], dtype=torch.int64, device=self._device)
        with lost_replicas():
            found = self._same_size(mine)
        if len(set(found)) > 1:
            raise ModelMismatch(
                "the sampler yields another order on each replica: samples would be used twice and others never",
                expected="the same order everywhere",
                actual=f"{len(set(found))} different orders on {self.place.replicas} replicas",
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

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.place.replicas)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def _same_size(self, tensor: Tensor) -> list[int]:
        return [int(part) for part in self._gathered(tensor)]


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
