"""Random lives of a host on several shards: workers die, pushes are repeated, and a push counts once on each shard."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ps_protocol.model.spec import Consistency
from ps_server.consistency import Position, PushInfo, Tracker, Verdict, WorkerKey
from tests.support.length import choose
from tests.support.seeds import drawn_seed

from .job import ASYNC, SYNC, ssp

DONE = (Verdict.APPLY, Verdict.HOLD, Verdict.DUPLICATE)


class Shard:
    """A tracker, and the log that it is brought back from."""

    def __init__(self, mode: Consistency, live: dict[int, int]) -> None:
        self._mode = mode
        self.log: list[tuple[tuple[PushInfo, ...], bool]] = []
        self.start(live)

    def start(self, live: dict[int, int]) -> None:
        """As after a kill: what was held is forgotten."""
        self.tracker = Tracker(self._mode)
        for version, (pushes, is_round) in enumerate(self.log, 1):
            self.tracker.replay(pushes, version, is_round=is_round)
        self.tracker.members(live)

    def push(self, push: PushInfo) -> Verdict:
        """On a stream that was opened again before; those of the other workers may not have been."""
        self.tracker.attach(push.worker, 0, push.position.clock - 1)
        verdict = self.tracker.push(push).verdict
        if verdict is Verdict.APPLY:
            self.log.append(((push,), False))
        self.take()
        return verdict

    def take(self) -> None:
        self.log += [(ready.contributions, True) for ready in self.tracker.take_ready(0.0) if ready.contributions]

    @property
    def counted(self) -> list[tuple[WorkerKey, int]]:
        pushes = (each for pushes, _ in self.log for push in pushes for each in push.contributions)
        return [(each.worker, each.sequence) for each in pushes]


@dataclass
class Worker:
    key: WorkerKey
    sequence: int = 0
    clock: int = 0


class Life:
    """One host of some workers, one more beside it, and the shards that they push to, each step to every shard."""

    def __init__(self, mode: Consistency, chance: random.Random) -> None:
        self.chance = chance
        self.live = {rank: rank + 1 for rank in range(chance.randrange(2, 6))}
        self.workers = {rank: Worker(WorkerKey(rank, life)) for rank, life in self.live.items()}
        self.lone = len(self.live) - 1
        self.shards = [Shard(mode, self.live) for _ in range(chance.randrange(1, 4))]
        #: Pushes of which each shard has told that it has them.
        self.made: list[tuple[WorkerKey, int]] = []
        #: Pushes that may be anywhere: their worker died.
        self.lost: set[tuple[WorkerKey, int]] = set()

    def step(self) -> None:
        infos = {rank: self.next_push(worker) for rank, worker in self.workers.items()}
        host = [rank for rank in infos if rank != self.lone]
        single = [(rank, shard) for rank in infos if rank == self.lone for shard in self.shards]
        if len(host) > 1:
            leader = self.chance.choice(host)
            others = tuple(infos[rank] for rank in host if rank != leader)
            whole = replace(infos[leader], others=others)
            for shard in self.chance.sample(self.shards, len(self.shards)):
                if self.chance.random() < 0.1:
                    self.die(leader, infos)
                if leader not in self.live:
                    break
                if self.chance.random() < 0.1:  # frozen so long that a follower has begun to push by itself
                    shard.push(self.chance.choice(others))
                if shard.push(whole) is Verdict.SEPARATE:
                    single += [(rank, shard) for rank in host]
                elif self.chance.random() < 0.2:  # the answer is lost
                    assert shard.push(whole) is Verdict.DUPLICATE
                self.restarts()
            if leader not in self.live:
                single += [(rank, shard) for rank in host for shard in self.shards]
        else:
            single += [(rank, shard) for rank in host for shard in self.shards]
        self.chance.shuffle(single)
        for rank, shard in single:
            if rank in self.live:
                assert shard.push(infos[rank]) in DONE
            self.restarts()
        self.repeat(infos)
        self.made += [(info.worker, info.sequence) for rank, info in infos.items() if rank in self.live]
        for rank in [rank for rank in self.workers if rank not in self.live]:
            del self.workers[rank]

    def repeat(self, infos: dict[int, PushInfo]) -> None:
        """A shard that was killed has forgotten what it held: those who wait for it push again, each by itself."""
        for shard in self.shards:
            for rank in self.live:
                assert shard.push(infos[rank]) in DONE

    def next_push(self, worker: Worker) -> PushInfo:
        worker.sequence += self.chance.randrange(1, 3)
        worker.clock += 1
        return PushInfo(worker.key, worker.sequence, Position(0, worker.clock), 0)

    def die(self, rank: int, infos: dict[int, PushInfo]) -> None:
        del self.live[rank]
        self.lost.add((infos[rank].worker, infos[rank].sequence))
        for shard in self.shards:
            shard.tracker.members(self.live)
            shard.take()

    def restarts(self) -> None:
        if self.chance.random() < 0.03:
            self.chance.choice(self.shards).start(self.live)


@pytest.mark.parametrize("mode", [ASYNC, ssp(2), SYNC], ids=str)
def test_each_push_counts_once_on_each_shard_whoever_dies_and_whatever_is_repeated(mode: Consistency) -> None:
    seed = drawn_seed()
    for number in range(choose(2000, 200)):
        life = Life(mode, random.Random(seed + number))
        for _ in range(6):
            life.step()
        for shard in life.shards:
            counted = shard.counted
            assert len(set(counted)) == len(counted), f"life {number}"
            assert set(counted) - life.lost == set(life.made), f"life {number}"
            assert len(shard.log) == shard.tracker.version
