"""A place in a cluster of fake shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import grpc
import numpy as np
import torch

from ps_protocol.cluster.transport import Transport
from ps_protocol.cluster.view import ClosedModelAsk, ClusterView
from ps_protocol.errors import PsError
from ps_protocol.model.spec import Consistency, Mode, ModelSpec, ShardMap
from ps_protocol.rpc.channel import open_channel
from ps_protocol.security.security import OFF
from ps_worker.session.instruments import Instruments
from ps_worker.session.reporting import WorkerCounters
from ps_worker.session.terminate import TerminationGuard
from tests.worker.fakes.placement import place
from tests.worker.fakes.shard import FakeShard


class FakeSession:
    """A place in a cluster of fake shards, which appear when the first model is declared."""

    takes_turns = False
    host = None
    pushes_with_host = False
    exchanging = staticmethod(nullcontext)

    def __init__(self, shards: int = 2, rank: int = 0, incarnation: int = 1) -> None:
        self.shard_count = shards
        self.rank = rank
        self.incarnation = incarnation
        self.phase = 0
        self.seed = 11
        self.revision = 1
        self.device = torch.device("cpu")
        self.security = OFF
        self.lowest = rank == 0
        self.lookahead = 0
        self.instruments = Instruments()
        self.counters = WorkerCounters()
        self.consistency = Consistency(Mode.SYNC)
        self.workers = [rank]
        self.transports: tuple[Transport, ...] = ()
        self.fenced: PsError | None = None
        self.shards: list[FakeShard] = []
        self.hints: list[str] = []
        self.on_hint: Callable[[], None] = lambda: None
        self.stepped = 0
        self.termination = TerminationGuard(3.0)
        self.steps: list[tuple[int | None, int, int]] = []
        self._channels: list[grpc.Channel] = []
        self.watchers: list[Callable[[], None]] = []
        self.view = ClusterView()
        self.closed: list[ClosedModelAsk] = []

    def join(self, rank: int, incarnation: int = 1) -> FakeSession:
        """Another worker of the same job."""
        other = FakeSession(self.shard_count, rank, incarnation)
        other.shards = self.shards
        return other

    def declare(self, spec: ModelSpec) -> ShardMap:
        shard_map = self._map = place(spec, self.shard_count)
        if not self.shards:
            self.shards += [FakeShard(shard_map, i) for i in range(self.shard_count)]
        return shard_map

    def epoch(self, model: str) -> int:
        return self._map.epoch

    def close_model(self, ask: ClosedModelAsk) -> None:
        self.closed.append(ask)

    def shard_map(self, model: str) -> ShardMap:
        return self._map

    def move(self, to: Mapping[int, int], *, taking: bool = False, buckets: Sequence[Sequence[int]] = ()) -> None:
        """Move slices by their numbers in the map; ``taking``: pushes under way are applied by all before.

        ``buckets``: per table, the shard of each from then on.
        """
        slices = tuple(replace(s, shard=to.get(i, s.shard)) for i, s in enumerate(self._map.slices))
        tables = tuple(map(tuple, buckets)) or self._map.tables
        count = max(self._map.shards, 1 + max([*to.values(), *(shard for owners in tables for shard in owners)]))
        if taking:
            for shard in self.shards:
                shard.take_under_way((self.rank, self.incarnation))
        values = {
            replace(span.slice, shard=0): tensor.detach().clone()
            for shard in self.shards
            for span, tensor in zip(shard.model.layout.slices, shard.model.tensors, strict=True)
        }
        rows: list[dict[int, np.ndarray]] = [
            {row: value for shard in self.shards for row, value in shard.model.tables.rows[table].items()}
            for table in range(len(tables))
        ]
        known = self.shards[0].model
        self._map = replace(self._map, epoch=self._map.epoch + 1, shards=count, slices=slices, tables=tables)
        for number in range(len(self.shards), count):
            self.shards.append(FakeShard(self._map, number))
            new = self.shards[-1].model
            new.version, new.last_sequence = known.version, dict(known.last_sequence)
        for shard in self.shards:
            shard.model.lay_out(self._map, values, rows)

    def shard_address(self, shard: int) -> str:
        return self.shards[shard].address

    def shard_incarnation(self, shard: int) -> int:
        return 1

    def on_shards(self, callback: Callable[[], None]) -> None:
        self.watchers.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self.watchers:
            self.watchers.remove(callback)

    def shard_channel(self, shard: int) -> grpc.Channel:
        for new in self.shards[len(self._channels) :]:
            self._channels.append(open_channel(new.address))
        return self._channels[shard]

    def check(self) -> None:
        if self.fenced is not None:
            raise self.fenced

    def initialiser(self) -> bool:
        return self.lowest

    def record_step(self, samples: int | None, staleness: int, bytes: int, clock: int = 0) -> None:
        self.steps.append((samples, staleness, bytes))

    def record_transport(self, by_shard: Mapping[int, str]) -> None:
        self.transports_used = dict(by_shard)

    def wait_hint(self, text: str) -> None:
        self.hints.append(text)
        self.on_hint()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@contextmanager
def job(shards: int = 2) -> Iterator[FakeSession]:
    """The session of rank 0; its shards end with the block."""
    session = FakeSession(shards)
    try:
        yield session
    finally:
        for shard in session.shards:
            shard.faults.release.put(None)
            shard.close()
        session.close()
