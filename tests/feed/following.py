"""A reader of the changes of real shards in this process, whose coordinator the test plays."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np

from ps_protocol.cluster.view import ClusterStatus, ClusterView, Member, Role
from ps_protocol.errors import Unavailable, UnknownModel
from ps_protocol.feed.cursor import Cursor
from ps_protocol.feed.reader import Change, Following, TableFeed
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import open_channel
from ps_worker.feed import TableCopy
from tests.shard.reshard.moving import Job


class Views:
    """One Watch call."""

    def __init__(self) -> None:
        self._views: queue.SimpleQueue[ClusterView | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[ClusterView]:
        yield from iter(self._views.get, None)
        raise Unavailable("cancelled")

    def show(self, view: ClusterView) -> None:
        self._views.put(view)

    def cancel(self) -> None:
        self._views.put(None)


class FakeCoordinator:
    """What a TableFeed asks a CoordinatorClient, of a job whose coordinator is the test."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.finished = False
        self._watching: list[Views] = []

    @property
    def view(self) -> ClusterView:
        shards = [Member(Role.SHARD, number, node.incarnation, node.address) for number, node in self.job.nodes.items()]
        return replace(self.job.view, members=(*self.job.view.members, *shards), finished=self.finished)

    def get_status(self, timeout_seconds: float) -> ClusterStatus:
        return ClusterStatus(self.view, ())

    def get_shard_map(self, model: str, timeout_seconds: float) -> ShardMap:
        if model not in self.job.maps:
            raise UnknownModel(f"no model '{model}'")
        return self.job.maps[model]

    def open_shard(self, address: str) -> grpc.Channel:
        return open_channel(address)

    def watch(self) -> Views:
        views = Views()
        views.show(self.view)
        self._watching.append(views)
        return views

    def show(self) -> None:
        """Tell readers how the cluster is now."""
        for views in self._watching:
            views.show(self.view)

    def feed(
        self,
        table: str = "ads",
        cursor: Cursor | None = None,
        say: Callable[[str], None] = lambda text: None,
        **fields: object,
    ) -> TableFeed:
        return TableFeed(self, Following(table, patience_seconds=30, **fields), cursor, say)  # type: ignore[arg-type]


def held(job: Job, table: int = 0, *, with_state: bool = False) -> dict[int, tuple[float, ...]]:
    """The rows of one table on all shards."""
    spec = job.maps["model"].spec.tables[table]
    width = spec.width if with_state else spec.dim
    found: dict[int, tuple[float, ...]] = {}
    for bucket, number in enumerate(job.maps["model"].tables[table]):
        contents = job.loop.run(job.model(number).copy_buckets(iter([(table, bucket)])))[1][0][1]
        rows = contents.rows[:, :width].tolist()
        found |= {id_: tuple(row) for id_, row in zip(contents.ids.tolist(), rows, strict=True)}
    return found


def rows_of(copy: TableCopy) -> dict[int, tuple[float, ...]]:
    ids = np.sort(copy.ids)
    return {id_: tuple(row) for id_, row in zip(ids.tolist(), copy.rows(ids).tolist(), strict=True)}


def until_equal(changes: Iterator[Change], copy: TableCopy, job: Job, **how: bool) -> list[Change]:
    """Apply changes, of which there are some, until the copy is what the shards hold; those it took."""
    taken = []
    for change in changes:
        taken.append(change)
        copy.apply(change)
        if change.whole and rows_of(copy) == held(job, **how):
            return taken
    raise AssertionError("the feed ended before the copy was equal")
