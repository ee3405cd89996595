"""What the folders of shards hold is read while the shards run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from chaos import replay as module
from chaos.replay import replay
from ps_protocol.errors import DamagedData
from tests.shard.disks import shard_on
from tests.support.shards import StubStream, flat, gradients, start, unflat


def test_a_shard_that_takes_snapshots_meanwhile_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shard_on(tmp_path) as shard:
        model, _ = start(shard, (4, 3), (5,))
        stream, link, left = StubStream(shard), os.link, [2, 1]

        def step() -> None:
            stream.exchange(flat(model.layout, *gradients(model, 1)))
            shard.loop.run(shard.storage.snapshotter.take())

        def linked(source: str, target: str) -> None:
            """Snapshots come after the folder was listed: those that were listed are no longer there."""
            if left:
                for _ in range(left.pop()):
                    step()
            link(source, target)

        step()
        monkeypatch.setattr(os, "link", linked)
        found = replay(tmp_path, 1)["model"]
        assert left == []
        assert found.versions == [model.tracker.version] == [4]
        published, give_back = shard.take(model)
        expected = unflat(model.layout, bytes(published.region.bytes))
        give_back()
        for ours, theirs in zip(found.tensors, expected, strict=True):
            assert torch.equal(ours, theirs.reshape(ours.shape))
        stream.end()


def test_a_folder_that_cannot_be_read_and_stays_as_it_is_is_an_error(tmp_path: Path) -> None:
    with shard_on(tmp_path) as shard:
        start(shard, (4, 3))
    (tmp_path / "shard-0" / "shard.json").write_text("{")
    with pytest.raises(DamagedData):
        replay(tmp_path, 1)


def test_a_shard_that_never_comes_to_rest_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shard_on(tmp_path) as shard:
        start(shard, (4, 3))
    listings = iter(range(1000))
    monkeypatch.setattr(module, "_contents", lambda folder: {(str(folder), next(listings))})
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="does not come to rest"):
        replay(tmp_path, 1)
