"""Checkpoints of formats 1 and 2, whose models had their options as JSON text, are restored as they were."""

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ps_protocol.model.spec import ModelSpec, Option
from ps_server.checkpoint.folder.directory import latest
from ps_server.checkpoint.read.checkpoint import Checkpoint
from tests.checkpoint.support import Job, shard_map_of, small_spec
from tests.checkpoint.tables import TableJob, table_spec
from tests.support.table_bits import bits_of

FOLDER = Path(__file__).with_name("checkpoints_of_formats_1_and_2.tar.xz")

GROUPS: tuple[dict[str, Option], ...] = (
    {"lr": 0.1, "betas": [0.5, 0.75], "eps": 1e-8, "amsgrad": True, "foreach": None, "weight_decay": 0},
    {"lr": 1, "betas": [0.25, 0.5], "eps": 1e-8, "amsgrad": False, "maximize": True},
)


def spec() -> ModelSpec:
    """Options of every shape, in two groups."""
    bare = small_spec("Adam")
    variables = (*bare.variables[:-1], bare.variables[-1])
    grouped = tuple(replace(v, group=number % 2) for number, v in enumerate(variables[:-1]))
    return replace(bare, variables=(*grouped, variables[-1]), group_options=GROUPS)


def dense() -> Job:
    return Job.of(shard_map_of(spec(), 2), seed=1).train([1])


def rows() -> TableJob:
    job = TableJob.of(table_spec(), table_spec("words", optimizer="ftrl"), shards=2)
    for seed in range(3):
        job.push(np.arange(40, dtype=np.int64), seed)
        job.push(np.arange(seed, 20, dtype=np.int64), seed, number=1)
    return job


def write(folder: Path) -> None:
    dense().save(folder / "1")
    rows().save(folder / "2")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with tarfile.open(FOLDER) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def opened(folder: Path) -> Checkpoint:
    newest = latest(folder)
    assert newest is not None
    checkpoint = Checkpoint.open(newest)
    checkpoint.verify()
    return checkpoint


def test_a_model_of_format_1_is_restored_as_it_was(older: Path) -> None:
    checkpoint, job = opened(older / "1"), dense()
    assert checkpoint.model("model").shard_map == job.shard_map
    restored = Job.restored(checkpoint, job.shard_map)
    torch.testing.assert_close(restored.values(), job.values())
    torch.testing.assert_close(restored.state(), job.state())


def test_tables_of_format_2_are_restored_as_they_were(older: Path) -> None:
    checkpoint, job = opened(older / "2"), rows()
    assert checkpoint.model("model").shard_map == job.shard_map
    restored = TableJob.restored(checkpoint, 2)
    buckets = [[list(table.here.nonzero()[0]) for table in tables] for tables in job.shards]
    for mine, other, here in zip(restored.shards, job.shards, buckets, strict=True):
        assert bits_of(mine, here) == bits_of(other, here)
