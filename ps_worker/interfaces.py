"""What the training side of a worker needs from its session: membership, channels, and a voice to the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import grpc
import torch

from ps_protocol.model import Consistency, ModelSpec, ShardMap
from ps_protocol.v1 import common_pb2


class TrainingSession(Protocol):
    """The worker's place in the cluster. Called by optimizers and pipelines from the user's thread."""

    @property
    def rank(self) -> int:
        """Number of the worker."""
        ...

    @property
    def incarnation(self) -> int:
        """The present life of the worker; higher than every earlier one."""
        ...

    @property
    def seed(self) -> int:
        """Common seed of the job."""
        ...

    @property
    def phase(self) -> int:
        """Barriers passed."""
        ...

    @property
    def revision(self) -> int:
        """Membership revision that includes this worker; a shard waits until its own view is as new."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the user trains."""
        ...

    @property
    def shard_count(self) -> int:
        """Shards of the cluster, numbered from 0."""
        ...

    @property
    def transports(self) -> Sequence[common_pb2.Transport]:
        """Side channels to be tried, best first; then everything goes by gRPC."""
        ...

    @property
    def consistency(self) -> Consistency:
        """The job's mode now."""
        ...

    @property
    def workers(self) -> Sequence[int]:
        """Ranks of the live workers, this one's too, rising."""
        ...

    @property
    def lookahead(self) -> int:
        """Steps that the mode lets parameters be used later than usual: 1, or 0 where none may be late."""
        ...

    def check(self) -> None:
        """Raises Fenced when this worker lost its place."""
        ...

    def shard_channel(self, shard: int) -> grpc.Channel:
        """A channel to the shard's present address; the session keeps and closes it."""
        ...

    def shard_address(self, shard: int) -> str:
        """host:port of the shard, for messages."""
        ...

    def shard_incarnation(self, shard: int) -> int:
        """The shard's present life, as far as this worker has heard; cheap, asked before every push."""
        ...

    def on_shards(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from another thread, when a shard was replaced. It must not block."""
        ...

    def forget(self, callback: Callable[[], None]) -> None:
        """Call it no longer."""
        ...

    def declare(self, spec: ModelSpec) -> ShardMap:
        """Declare a model to the coordinator. Raises ModelMismatch when the job's differs."""
        ...

    def epoch(self, model: str) -> int:
        """The newest epoch of the model's shard map that this worker has heard of; 0: none. Cheap."""
        ...

    def shard_map(self, model: str) -> ShardMap:
        """The shard map in force; another one than before when slices have moved."""
        ...

    def initialiser(self) -> bool:
        """Whether this is the lowest live rank now: the one that uploads initial values."""
        ...

    def record_step(self, samples: int | None, staleness: int, bytes: int) -> None:
        """Count one push for the statistics; ``bytes`` went over the wire, both ways."""
        ...

    def record_transport(self, by_shard: Mapping[int, str]) -> None:
        """How steps travel to each shard now."""
        ...

    def wait_hint(self, text: str) -> None:
        """Tell the user what is being waited for; the session limits how often."""
        ...
