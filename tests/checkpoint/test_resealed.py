"""A manifest that somebody changed and sealed again: what it says is checked before any of it is believed."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest, ModelMismatch
from ps_protocol.model.layout import Layout
from ps_protocol.sealed import SEAL_BYTES, sealed
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.files import MANIFEST_NAME
from ps_server.consistency import TrackerState
from ps_server.shard.placing import batches, saved_tracker
from tests.support.seeds import drawn_seed

from .support import Job, shard_map_of, small_spec
from .tables import TableJob, table_spec

DENSE, ROWS = small_spec("Adam"), (table_spec("ads"), table_spec("users", 2, "adam"))
CASES = 150
"""Of each kind of checkpoint."""

WRONG: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, -(1 << 63), 1 << 63, 1 << 70, 10**300, 0.5, 1e308, float("inf"),
    "", "x", "..", "../../etc/passwd", "/etc/passwd", "a/b", ".", "model\0", "\ud800", "float64", "0" * 16, "é" * 300,
    [], {}, [1], [[]], [None], {"a": 1}, [1 << 40, 1 << 40], [0, -1],
)  # fmt: skip


def reseal(folder: Path, body: Any) -> None:
    (folder / MANIFEST_NAME).write_bytes(sealed(json.dumps(body).encode()))


def body_of(folder: Path) -> Any:
    return json.loads(b"{" + (folder / MANIFEST_NAME).read_bytes()[SEAL_BYTES:])


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything lies in it."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(node[key], (*path, key))


def damaged(body: Any, draw: random.Random) -> Any:
    """``body`` with one to three places changed, taken away, doubled, or exchanged."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        known = list(places(body))
        *path, key = draw.choice(known)
        node = at(body, path)
        match draw.randrange(6):
            case 0:
                del node[key]
            case 1 if isinstance(node, list):
                node.insert(key, copy.deepcopy(node[key]))
            case 2:
                node[key] = copy.deepcopy(at(body, draw.choice(known)))
            case 3 if isinstance(node[key], int):
                node[key] += draw.choice((-1, 1, 8, -8, 1 << 20, 1 << 50))
            case _:
                node[key] = draw.choice(WRONG)
    return body


def at(body: Any, path: tuple[Any, ...] | list[Any]) -> Any:
    for key in path:
        body = body[key]
    return body


def read_dense(folder: Path) -> None:
    """All that shards read when they restore a model, and what they do with it."""
    Job.restored(Checkpoint.open(folder), shard_map_of(DENSE, 1))


def read_rows(folder: Path) -> None:
    """All that a shard reads when it restores a model of tables."""
    checkpoint = Checkpoint.open(folder)
    job = TableJob.of(*ROWS, shards=1)
    checkpoint.check_matches(job.shard_map.spec)
    for lot in batches(checkpoint, Layout.of(job.shard_map, 0)):
        for number, contents in lot:
            job.shards[0][number].put(contents)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = Job.of(shard_map_of(DENSE, 2), seed=1).train([1])
    return job.save(tmp_path_factory.mktemp("dense")).folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second of two: it goes on from the first."""
    directory = tmp_path_factory.mktemp("rows")
    job = TableJob.of(*ROWS)
    for number in range(2):
        job.push(np.arange(40), seed=number, number=number)
        folder = job.save(directory, full_every=2).folder
        job.push(np.arange(90, 95), seed=7)
    return folder


@pytest.mark.parametrize(("kind", "read"), [("dense", read_dense), ("rows", read_rows)])
def test_any_manifest_that_was_changed_and_sealed_again_is_right_or_one_typed_error(
    request: pytest.FixtureRequest, kind: str, read: Callable[[Path], None]
) -> None:
    folder = request.getfixturevalue(kind)
    whole, seed = body_of(folder), drawn_seed()
    draw = random.Random(seed)
    refused = 0
    try:
        for number in range(CASES):
            body = damaged(whole, draw)
            reseal(folder, body)
            try:
                read(folder)
                Checkpoint.open(folder).verify()
            except (DamagedData, ModelMismatch, ConfigError, InvalidRequest):
                refused += 1
            except Exception as error:
                raise AssertionError(f"case {number} of seed {seed}: {changes(whole, body)}") from error
    finally:
        reseal(folder, whole)
    read(folder)
    assert refused > CASES // 2


@pytest.mark.parametrize("tracker", [None, 1, [], {}, {"version": -1}, {"version": "x"}])
def test_where_a_job_stood_is_checked_before_it_is_believed(dense: Path, tracker: Any) -> None:
    whole = body_of(dense)
    body = copy.deepcopy(whole)
    for facts in body["models"]["model"]["facts"]:
        facts["tracker"] = TrackerState().to_json() | tracker if isinstance(tracker, dict) and tracker else tracker
    try:
        reseal(dense, body)
        with pytest.raises(DamagedData, match="does not say where model"):
            saved_tracker(Checkpoint.open(dense), "model")
    finally:
        reseal(dense, whole)


def test_a_checkpoint_that_goes_on_from_itself_is_damaged(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = body_of(rows)
    body = copy.deepcopy(whole)
    for part in body["models"]["model"]["tables"]:
        if part["base"]:
            part["base"]["folder"] = rows.name
    monkeypatch.setattr("ps_server.checkpoint.checkpoint.read_seal", lambda folder: part_seal(body))
    try:
        reseal(rows, body)
        with pytest.raises(DamagedData, match="builds on itself"):
            Checkpoint.open(rows).lineage("model", "ads")
    finally:
        reseal(rows, whole)


def part_seal(body: Any) -> str:
    seals = {part["base"]["seal"] for part in body["models"]["model"]["tables"] if part["base"]}
    return str(seals.pop())


def in_place_of(path: Path, make: Callable[[Path], object]) -> Iterator[None]:
    """While something else lies where ``path`` was."""
    kept = path.with_name("kept")
    path.rename(kept)
    make(path)
    yield
    path.unlink()
    kept.rename(path)


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("which", [MANIFEST_NAME, "model/model-00001-of-00002.safetensors"])
def test_what_is_no_plain_file_is_not_read(dense: Path, kind: str, which: str) -> None:
    """A reader of a pipe would wait for its writer; a link leads elsewhere."""
    path = dense / which
    make = os.mkfifo if kind == "pipe" else lambda at: at.symlink_to(at.with_name("kept"))
    for _ in in_place_of(path, make):
        with pytest.raises(DamagedData, match="is no plain file") as refused:
            read_dense(dense)
        assert str(path) in str(refused.value)
        assert refused.value.remedy
    read_dense(dense)


def test_no_link_is_followed_on_the_way_to_a_file(dense: Path) -> None:
    folder = dense / "model"
    for _ in in_place_of(folder, lambda at: at.symlink_to(at.with_name("kept"))):
        with pytest.raises((DamagedData, ConfigError)):
            read_dense(dense)
    read_dense(dense)


def test_a_manifest_that_is_too_large_is_not_read_and_not_written(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (dense / MANIFEST_NAME).stat().st_size
    monkeypatch.setattr("ps_server.checkpoint.manifest.MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(DamagedData, match="larger than it can be") as refused:
        Checkpoint.open(dense)
    assert refused.value.actual == f"{size} bytes"
    monkeypatch.setattr(sys.modules["ps_server.checkpoint.commit"], "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="larger than readers take"):
        Job.of(shard_map_of(DENSE, 2), seed=1).save(tmp_path)
    assert not list(tmp_path.rglob(MANIFEST_NAME))


def changes(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two bodies differ, for people."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [each for key in keys for each in changes(one.get(key), other.get(key), f"{path}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [each for n, pair in enumerate(zip(one, other, strict=True)) for each in changes(*pair, f"{path}/{n}")]
    return [] if one == other else [f"{path}: {str(one)[:60]} -> {str(other)[:60]}"]
