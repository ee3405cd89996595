"""A worker of the shards of one job, and what its steps make without a move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ps_protocol.model.spec import ModelSpec
from ps_protocol.v1 import shard_pb2 as pb
from tests.shard.reshard.moving import ROWS, Job, gradients_of, job, payload_of
from tests.support.shards import StubStream


class Worker:
    """Pushes the same steps to every shard that holds slices, as rank 0 unless told."""

    def __init__(self, job: Job, rank: int = 0) -> None:
        self._job = job
        self.rank = rank
        self.step = 0
        self.streams: dict[int, StubStream] = {}
        self.open()

    def open(self) -> None:
        job = self._job
        self.streams = {
            n: StubStream(job.nodes[n], self.rank, job.live[self.rank], epoch=job.maps["model"].epoch)
            for n in job.holders
        }

    def send(self) -> None:
        """The next step, to all shards; answers are not waited for."""
        self.step += 1
        self.repeat()

    def repeat(self) -> None:
        """The step under way, again."""
        tensors = gradients_of(self._job.maps["model"].spec, 1000 * self.rank + self.step)
        for number, stream in self.streams.items():
            payload = payload_of(self._job.model(number).layout, tensors)
            stream.push(payload, sequence=self.step, clock=self.step, with_buffers=True)

    def results(self) -> list[int]:
        """What became of the step, by shard."""
        return [stream.result()[0].outcome for _, stream in sorted(self.streams.items())]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.send()
            assert self.results() == [pb.OUTCOME_APPLIED] * len(self.streams)

    def end(self) -> None:
        for stream in self.streams.values():
            stream.end()


def undisturbed(spec: ModelSpec, steps: int) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
    """Values and state after these steps of worker 0, all slices on one shard."""
    with job(spec, [0] * len(ROWS), 1) as alone:
        worker = Worker(alone)
        worker.train(steps)
        found = alone.values(), alone.state()
        worker.end()
        return found


def assert_same(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor], *, exact: bool = True) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if exact:
            assert torch.equal(found[key], tensor), key
        else:
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7)
