"""What the processes of one simulated cluster share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.coordinator import SimCoordinator
from simulation.judge import Judge
from simulation.network import Network
from simulation.plan import Plan
from simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from simulation.shard import SimShard


@dataclass(slots=True)
class Shared:
    """One per run."""

    scheduler: Scheduler
    network: Network
    coordinator: SimCoordinator
    judge: Judge
    plan: Plan
    #: Every shard process that ever was, by the address it serves at.
    shards_by_address: dict[str, SimShard] = field(default_factory=dict)
