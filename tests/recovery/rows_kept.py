"""What the rows of ``row_scripts`` must be, as they are served and as they lie on the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grpc
import numpy as np

from ps_protocol.cluster.view import Role
from ps_protocol.model.tables import Ids
from ps_protocol.v1 import shard_pb2, shard_pb2_grpc
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from ps_server.state.model_state import ModelState
from tests.recovery.cluster import Cluster, Program, Worker
from tests.recovery.row_scripts import ALWAYS, MOST_ROWS, all_ids, digest_of
from tests.support.shards import wait_until


def assert_each_push_is_in_its_rows_once(
    cluster: Cluster, shard: Program, worker: Worker, data: Path, steps: int, rows: int
) -> None:
    """``shard``, which keeps its data in ``data``, holds the place; ``worker`` is told to end, and ``shard`` killed."""
    worker.read("stays")
    address = cluster.status().view.live(Role.SHARD)[0].address
    with grpc.insecure_channel(address) as channel:
        stub = shard_pb2_grpc.ShardStub(channel)
        # Then no row goes any more: served and written are the same.
        wait_until(lambda: stub.GetModel(shard_pb2.GetModelRequest(model="model")).tables[1].rows <= MOST_ROWS)
    worker.tell()
    counts = json.loads(worker.read("ledger").removeprefix("ledger "))
    digest = worker.read("digest").split()[1]
    assert worker.wait() == 0
    assert counts[: len(ALWAYS)] == [steps] * len(ALWAYS)
    assert counts[len(ALWAYS) :] == [1] * (steps * rows)
    shard.kill()
    found, ids = _recovered(data, cluster.folder / "copy"), all_ids(steps, rows)
    ledger, recent = found.replica.tables
    assert ledger.rows == ids.size
    assert 0 < recent.rows <= MOST_ROWS
    assert ledger.updates == recent.updates == found.tracker.version == steps
    assert _rows(found, 0, ids).flatten().tolist() == counts
    assert digest_of(_rows(found, 1, ids)) == digest


def _recovered(data: Path, copy: Path) -> ModelState:
    shutil.copytree(data / "shard-0", copy / "shard-0")
    folder = DataFolder.open(copy, 0)
    try:
        return recover(folder, log_goes_on=True).models["model"]
    finally:
        folder.close()


def _rows(model: ModelState, table: int, ids: Ids) -> np.ndarray:
    held = model.replica.tables[table]
    values = np.empty((ids.size, held.spec.dim), np.float32)
    held.look_up(ids, values)
    return values
