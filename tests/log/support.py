"""A model, entries of a log about it, and a log in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ps_protocol.model.layout import Layout
from ps_server.consistency import Position, PushInfo, WorkerKey
from ps_server.log.durable import DurableLog
from ps_server.log.entries import AppliedUpdate, Loaded, Placed
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import Recovered, recover
from ps_server.log.snapshots import ModelPart, SnapshotWriter
from ps_server.state.blocks import blocks_of
from ps_server.state.region import Region
from ps_server.state.replica import Step
from tests.support.shards import simple_spec, whole_map

MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def layout_of(*shapes: tuple[int, ...], **arguments) -> Layout:
    return Layout.of(whole_map(simple_spec(*shapes, **(MOMENTUM | arguments))), 0)


def random_region(layout: Layout, seed: int) -> Region:
    region = Region(layout)
    generator = torch.Generator().manual_seed(seed)
    for index, span in enumerate(layout.slices):
        region.slice(index).copy_(torch.randn(span.shape, generator=generator))
    return region


def update(layout: Layout, version: int, absent: frozenset[int] = frozenset(), **fields) -> AppliedUpdate:
    """The push ``version`` of worker 0, applied alone."""
    push = PushInfo(WorkerKey(0, 1), version, Position(0, version), version - 1)
    step = Step(random_region(layout, version), absent, layout.shard_map.spec.group_options, **fields)
    return AppliedUpdate(layout.shard_map.spec.name, version, (push,), False, step)


def beginning(layout: Layout) -> list[Placed | Loaded]:
    """The first two entries of every model."""
    return [Placed(layout.shard_map), Loaded(layout.shard_map.spec.name, random_region(layout, 0), None)]


@contextmanager
def opened(root: Path, *, sync: bool = False, gently: bool = False) -> Iterator[tuple[DurableLog, Recovered]]:
    """The log in ``root`` as the next process finds it, and what it holds; killed at the end unless ``gently``."""
    folder = DataFolder.open(root, 0)
    try:
        found = recover(folder, log_goes_on=True)
        log = DurableLog(folder, found.number, found.end, sync=sync)
        try:
            yield log, found
        finally:
            if gently:
                log.close()
            else:
                log._close_segment()
                log.settle()
    finally:
        folder.close()


def write_log(root: Path, layout: Layout, count: int) -> list[bytes]:
    """A log of ``count`` updates; returns the parameters after each, those before the first included."""
    with opened(root) as (log, found):
        entries = [*beginning(layout), *(update(layout, version) for version in range(1, count + 1))]
        for entry in entries:
            log.append(entry)
        assert found.number == 0
    return served_by_version(layout, count)


def write_snapshot(root: Path) -> None:
    """One of all that the log in ``root`` holds, which is cut then."""
    with opened(root) as (log, found):
        with SnapshotWriter(root / "shard-0" / "snapshots", found.number) as writer:
            for model in found.models.values():
                replica = model.replica
                writer.begin_model(ModelPart(model.shard_map, True, model.tracker.persisted_state(), found.number))
                for block in blocks_of(replica.layout):
                    values = replica.region.bytes[block.begin : block.end]
                    writer.write_block(block, found.number, values, replica.state(block.slices))
            log.flush(found.number)
            snapshot = writer.commit(found.number, log_goes_on=True)
        log._folder.holds_snapshot(snapshot.through)
        log.cut(snapshot.number, 1)


def go_on(root: Path, layout: Layout, first: int, last: int) -> None:
    """Updates ``first`` to ``last``, behind those in ``root``."""
    with opened(root) as (log, _):
        for version in range(first, last + 1):
            log.append(update(layout, version))


def served_by_version(layout: Layout, count: int) -> list[bytes]:
    from ps_server.state.replica import Replica

    replica = Replica(layout)
    replica.load(random_region(layout, 0), None)
    served = [bytes(replica.region.bytes)]
    for version in range(1, count + 1):
        replica.apply(update(layout, version).step)
        served.append(bytes(replica.region.bytes))
    return served


def segments(root: Path) -> list[Path]:
    return sorted((root / "shard-0" / "log").glob("[0-9]*.log"))
