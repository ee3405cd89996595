"""A shard that dies while the rows of a checkpoint are put into its tables does not take them for all it needs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ps_server.log.entries import BucketsPut
from ps_server.shard import placing as shard_restore
from ps_server.tables.bucket_contents import BucketContents
from tests.shard.disks import shard_on
from tests.support.loops import in_loop
from tests.support.shards import load
from tests.support.tables import spec_with, table_spec, whole_table_map


def bucket_of(model, number: int) -> BucketContents:
    """One row: id 5, wherever it would belong."""
    contents = model.tables[0].contents(number)
    rows = np.full((1, contents.rows.shape[1]), 3.0, np.float32)
    one = np.array([5])
    nothing = np.empty(0, np.int64)
    uses = np.zeros(1, np.uint32)
    return BucketContents(number, 9, one, one, rows, uses, nothing, nothing, np.empty(0, np.uint32))


def test_rows_without_values_are_no_restored_model_and_both_are(tmp_path: Path) -> None:
    spec = spec_with(table_spec(buckets=1))
    with shard_on(tmp_path) as shard:
        model = shard.place(whole_table_map(spec))
        entry = BucketsPut("model", [(0, bucket_of(model, 0))])
        shard.loop.run(model.rows.write(entry, 1000, at_cut=True))
    with shard_on(tmp_path) as shard:
        model = shard.place(whole_table_map(spec))
        assert not model.initialised
        assert (model.tables[0].rows, model.tables[0].updates) == (1, 9)
        assert load(shard, model, bytes(model.layout.region_bytes)).written
    with shard_on(tmp_path) as shard:
        model = shard.place(whole_table_map(spec))
        assert model.initialised
        assert model.tables[0].rows == 1


@in_loop
async def test_a_restore_whose_caller_goes_waits_for_what_is_being_read(monkeypatch):
    """A generator at work in a thread cannot be closed."""
    reading, goes_on = threading.Event(), threading.Event()

    def slowly(*arguments):
        reading.set()
        assert goes_on.wait(60)
        yield from ()

    monkeypatch.setattr(shard_restore, "batches", slowly)
    monkeypatch.setattr(shard_restore, "read", lambda *_: (None, []))
    restoring = asyncio.create_task(
        shard_restore.restore(None, SimpleNamespace(layout=None), only_first=False)  # type: ignore[arg-type]
    )
    await asyncio.to_thread(reading.wait, 20)
    restoring.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await restoring
