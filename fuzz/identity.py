"""The place that an attacker has in the cluster: a member like any other, with a model of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.model.layout import Layout
from ps_protocol.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc, shard_pb2, shard_pb2_grpc
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_protocol.wire.convert.options import options_to_pb

TABLE = "attacked-rows"


def spec(model: str) -> common_pb2.ModelSpec:
    """Two variables and a table."""
    variables = [
        common_pb2.Variable(name=name, shape=shape, dtype=common_pb2.DTYPE_FLOAT32, kind=common_pb2.KIND_PARAMETER)
        for name, shape in (("matrix", (8, 4)), ("bias", (3,)))
    ]
    rows = common_pb2.TableSpec(
        name=TABLE,
        dim=4,
        buckets=16,
        init=common_pb2.RowInit(kind="constant"),
        optimizer="sgd",
        arguments=options_to_pb({"lr": 0.1, "weight_decay": 0.0, "max_norm": 0.0}),
    )
    return common_pb2.ModelSpec(
        name=model,
        optimizer="torch.optim.SGD",
        variables=variables,
        groups=[options_to_pb({"lr": 0.1})],
        nonfinite=common_pb2.NON_FINITE_REFUSE,
        buffers=common_pb2.BUFFERS_RANK0,
        tables=[rows],
    )


@dataclass
class Identity:
    """Joined, with its model on the shards. Renews its lease until ``leave``. Used on one event loop."""

    coordinator: str
    #: Its own: an attack may release the model and declare another of that name, which a later attacker would meet.
    model: str
    rank: int = 0
    incarnation: int = 0
    epoch: int = 0
    region_bytes: int = 0
    #: Incarnations of everybody else: what they may do to themselves, nobody without a key can be kept from doing.
    others: frozenset[int] = frozenset()
    #: The first view of the cluster that has this worker.
    revision: int = 0
    _beating: asyncio.Task[None] | None = field(default=None, repr=False)

    async def join(self) -> None:
        """Become a worker and declare the model. Raises grpc.RpcError."""
        async with grpc.aio.insecure_channel(self.coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            joined = await stub.Join(
                coordinator_pb2.JoinRequest(
                    role=coordinator_pb2.ROLE_WORKER,
                    protocol_version=PROTOCOL_VERSION,
                    token="attacker",
                    host="localhost",
                )
            )
            self.rank, self.incarnation, self.revision = joined.index, joined.incarnation, joined.revision
            declared = await stub.DeclareModel(
                coordinator_pb2.DeclareModelRequest(rank=self.rank, incarnation=self.incarnation, spec=spec(self.model))
            )
            shard_map = SHARD_MAP.from_pb(declared)
            self.epoch, self.region_bytes = shard_map.epoch, Layout.of(shard_map, 0).region_bytes
            status = await stub.GetStatus(coordinator_pb2.GetStatusRequest())
            members = [each.member.incarnation for each in status.members]
            self.others = frozenset(members) - {self.incarnation}
        self._beating = asyncio.create_task(self._beat(joined.heartbeat_seconds))

    async def load(self, shard: str) -> None:
        """Give the model values on the shard. Raises grpc.RpcError."""
        worker = shard_pb2.WorkerId(rank=self.rank, incarnation=self.incarnation)
        # The shard may not have heard of this worker yet.
        header = shard_pb2.LoadHeader(
            model=self.model,
            epoch=self.epoch,
            worker=worker,
            with_region=True,
            membership_revision=self.revision,
        )
        chunk = shard_pb2.Chunk(position=0, payload=bytes(self.region_bytes))
        async with grpc.aio.insecure_channel(shard) as channel:
            requests = [shard_pb2.LoadRequest(header=header), shard_pb2.LoadRequest(chunk=chunk)]
            await shard_pb2_grpc.ShardStub(channel).Load(iter(requests))

    async def leave(self) -> None:
        """Let the place go."""
        if self._beating:
            self._beating.cancel()

    async def _beat(self, seconds: float) -> None:
        async with grpc.aio.insecure_channel(self.coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            message = coordinator_pb2.HeartbeatRequest(
                role=coordinator_pb2.ROLE_WORKER, index=self.rank, incarnation=self.incarnation
            )
            while True:
                await asyncio.sleep(seconds)
                try:
                    await stub.Heartbeat(message, timeout=10)
                except grpc.RpcError:
                    # A mutated Leave or Join may have ended this membership: that is its own doing.
                    return
