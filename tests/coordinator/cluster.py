"""A cluster's state with short names for its events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ps_protocol.cluster.view import Joined, JoinRequest, Member, MemberStats, Role
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Variable
from ps_server.coordinator.changes import StateChange
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.state import ClusterState

SPEC = ModelSpec(
    "net",
    "torch.optim.SGD",
    (
        Variable("w", (100, 4), DType.FLOAT32),
        Variable("b", (4,), DType.FLOAT32),
        Variable("mean", (4,), DType.FLOAT32, Kind.BUFFER),
    ),
    ({"lr": 0.1},),
)


class Cluster:
    """The state, the time, and events by their names."""

    def __init__(self, **settings: Any) -> None:
        self.settings = replace(ClusterSettings(first_incarnation=100, lease_seconds=5.0), **settings)
        self.state = ClusterState(self.settings)
        self.now = 0.0
        self.joins = 0

    def join(self, role: Role, index: int | None = None, token: str | None = None, state: int = 0) -> Joined:
        self.joins += 1
        address = "host:1" if role is Role.SHARD else ""
        token = token if token is not None else f"token {self.joins}"
        ask = JoinRequest(role, index, address, token, data_incarnation=state, take_over=index is not None)
        return self.state.membership.join(ask, self.now).value

    def shard(self, index: int = 0, state: int = 0) -> Joined:
        """A shard that brings the state incarnation ``state`` wrote."""
        return self.join(Role.SHARD, index, state=state)

    def keep(self, joined: Joined) -> str:
        """The shard says that its state is on disk."""
        m = joined.member
        beat = self.state.membership.heartbeat(
            m.role, m.index, m.incarnation, MemberStats(), self.now, keeps_state=True
        )
        return beat.reason

    def worker(self, rank: int | None = None, token: str | None = None) -> Joined:
        return self.join(Role.WORKER, rank, token)

    def heartbeat(self, joined: Joined) -> None:
        m = joined.member
        self.state.membership.heartbeat(m.role, m.index, m.incarnation, MemberStats(), self.now)

    def leave(self, joined: Joined, why: str = "") -> str:
        m = joined.member
        return self.state.membership.leave(m.role, m.index, m.incarnation, why, self.now).reason

    def arrive(self, joined: Joined, phase: int = 0) -> bool:
        return self.state.membership.arrive(joined.member.index, joined.member.incarnation, phase).value.released

    def declare(self, joined: Joined, spec: ModelSpec = SPEC) -> ShardMap:
        return self.declaration(joined, spec).value

    def declaration(self, joined: Joined, spec: ModelSpec) -> StateChange[ShardMap]:
        member = self.state.membership.find(Role.WORKER, joined.member.index, joined.member.incarnation)
        plan = self.state.placement.plan(member, spec)
        return self.state.placement.adopt(member, plan, plan.make())


def declare(driver: Driver, worker: Member, spec: ModelSpec = SPEC) -> ShardMap:
    """As the service does, but for its thread."""
    plan = driver.plan(worker.index, worker.incarnation, spec)
    return driver.adopt(worker.index, worker.incarnation, plan, plan.make())
