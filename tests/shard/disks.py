"""A shard that keeps its state in a folder, and how often it takes snapshots."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ps_protocol.model.spec import Consistency
from ps_server.cli.options.storage import Durability, SnapshotRule, StorageConfig
from ps_server.shard.step.model import ShardModel
from tests.support.shards import TestShard, running_shard

NEVER = SnapshotRule(seconds=1e9)
OFTEN = SnapshotRule(seconds=0.01)


def durable(
    path: Path, rule: SnapshotRule = NEVER, durability: Durability = Durability.DURABLE, **fields: bool
) -> StorageConfig:
    return StorageConfig(durability, path, snapshots=rule, **fields)


def shard_on(
    path: Path, live: dict[int, int] | None = None, mode: Consistency | None = None, **fields: object
) -> AbstractContextManager[TestShard]:
    return running_shard(live, mode, storage_config=durable(path, **fields))


def copy_of(folder: Path, target: Path) -> Path:
    """What lies in ``folder`` now, where no snapshot is being written, copied to ``target``.

    Half-made files, which a start removes, stay behind: a thread may make room ahead and rename them meanwhile.
    """
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.part")))


def held(shard: TestShard, model: ShardModel) -> torch.Tensor:
    """The bytes of its variables."""
    published, give_back = shard.take(model)
    data = published.region.data.clone()
    give_back()
    return data
