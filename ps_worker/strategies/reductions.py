"""Ways to average gradients over replicas, each as a communication hook of DistributedDataParallel.

``ring``: a reduce-scatter and an all-gather between neighbours, 2 (W - 1) steps of 1/W of the bytes each: no replica
is a bottleneck. ``reduce_to_one_device``: everything is summed on replica 0 and sent from there; fewest steps, all
bytes through one replica. ``hierarchical_copy``: sums within each group of replicas, then between the groups' first
ones, then back: for groups, such as hosts, with slow connections between them. Without a name the backend's own
all-reduce is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ps_protocol.errors import ConfigError
from ps_worker.strategies.placement import Placement
from ps_worker.strategies.process_group import lost_replicas

Hook = Callable[[object, GradBucket], "torch.futures.Future[Tensor]"]

REDUCTIONS = ("ring", "hierarchical_copy", "reduce_to_one_device")


def check_reduction(name: str | None, place: Placement) -> None:
    """Raises ConfigError for a name that is not known, and for groups that these replicas do not form."""
    if name is not None and name not in REDUCTIONS:
        raise ConfigError("unknown reduction", expected=", ".join(REDUCTIONS), actual=name)
    if name == "hierarchical_copy" and place.replicas > 1 and not groups_of(place):
        raise ConfigError(
            "hierarchical_copy needs at least two groups of two replicas: with fewer it is another reduction",
            expected="at least 4 replicas, as many on each host, an even number on one host",
            actual=f"{place.replicas} replicas, {place.local_replicas} on this host",
            remedy="use ring or reduce_to_one_device",
        )


def groups_of(place: Placement) -> list[range]:
    """The replicas of each host, or the halves of those of one host; empty where these are no groups."""
    size = place.local_replicas if place.local_replicas < place.replicas else place.replicas // 2
    if size < 2 or place.replicas % size:
        return []
    return [range(first, first + size) for first in range(0, place.replicas, size)]


def hook_of(name: str, place: Placement) -> Hook:
    """The hook for the reduction ``name``. Every replica calls this at the same point: groups are made."""
    reduce = _hierarchical(place) if name == "hierarchical_copy" else _SUMS[name]

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer().div_(place.replicas)
        with lost_replicas():
            reduce(gradients, place)
        devices: list[int | str | torch.device] | None = [gradients.device] if gradients.device.type == "cuda" else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        done.set_result(gradients)
        return done

    # torch compares annotations with its class; here they are text.
    hook.__annotations__.clear()
    return hook


def _ring(tensor: Tensor, place: Placement) -> None:
    count, rank = place.replicas, place.rank
    parts = tensor.tensor_split(count)
    for step in range(2 * (count - 1)):
        # The first half sums up parts on their way round, the second half carries the sums round.
        summing = step < count - 1
        shift = step if summing else step - count
        sent, received = parts[(rank - shift) % count], parts[(rank - shift - 1) % count]
        incoming = torch.empty_like(received) if summing else received
        _exchange(sent, (rank + 1) % count, incoming, (rank - 1) % count)
        if summing:
            received += incoming


def _exchange(sent: Tensor, to: int, received: Tensor, source: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, to)] if sent.numel() else []
    operations += [dist.P2POp(dist.irecv, received, source)] if received.numel() else []
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _to_one_device(tensor: Tensor, place: Placement) -> None:
    dist.reduce(tensor, dst=0)
    dist.broadcast(tensor, src=0)


def _hierarchical(place: Placement) -> Callable[[Tensor, Placement], None]:
    members = groups_of(place)
    handles: list[Any] = [dist.new_group(list(each)) for each in members]
    leaders: Any = dist.new_group([each[0] for each in members])
    mine = next(number for number, each in enumerate(members) if place.rank in each)

    def reduce(tensor: Tensor, place: Placement) -> None:
        first = members[mine][0]
        dist.reduce(tensor, dst=first, group=handles[mine])
        if place.rank == first:
            dist.all_reduce(tensor, group=leaders)
        dist.broadcast(tensor, src=first, group=handles[mine])

    return reduce


_SUMS: dict[str, Callable[[Tensor, Placement], None]] = {"ring": _ring, "reduce_to_one_device": _to_one_device}
