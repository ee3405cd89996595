"""A bucket is copied, sent and put elsewhere as it was, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Eviction, RowLife, TableSpec
from ps_protocol.wire.convert.shard import BUCKET_HEADER
from ps_server.tables.bucket_contents import MAX_UPDATES, BucketContents
from ps_server.tables.table import ShardTable
from tests.tables.samples import NO_IDS, random_ids, same, spec, table, use, values

_LIFE = RowLife(admit_after=2, max_rows=1000, eviction=Eviction.LFU)


def _trained(declared: TableSpec, seed: int = 1, steps: int = 6) -> ShardTable:
    random = np.random.default_rng(seed)
    ids, held = random_ids(random, 300), table(declared)
    for _ in range(steps):
        chosen = random.permutation(ids)[:100]
        use(held, chosen, random.standard_normal((100, declared.dim)).astype(np.float32))
    return held


def _sent(held: ShardTable, bucket: int) -> BucketContents:
    contents = held.contents(bucket)
    (header,) = BUCKET_HEADER.all_from_pb(BUCKET_HEADER.all_to_pb([contents.header(3)]))
    return BucketContents.read(held.spec, header, memoryview(b"".join(contents.pieces())))


@pytest.mark.parametrize("name", list(ROW_OPTIMIZERS))
def test_buckets_put_elsewhere_go_on_as_where_they_were(name: str) -> None:
    held = _trained(spec(name, life=_LIFE))
    assert held.rows > 50
    assert held.waiting > 20
    other = ShardTable(held.spec, [])
    for bucket in range(held.spec.buckets):
        other.put(_sent(held, bucket))
    for each in (held, other):
        use(each, np.arange(-50, 50), np.ones((100, 4), np.float32))
        use(each, np.arange(-40, 50), np.ones((90, 4), np.float32))
    assert (other.rows, other.waiting, other.updates) == (held.rows, held.waiting, held.updates)
    assert all(same(held.contents(bucket), other.contents(bucket)) for bucket in range(held.spec.buckets))


def test_contents_do_not_depend_on_how_a_bucket_came_to_them() -> None:
    straight, detour = _trained(spec("adagrad")), _trained(spec("adagrad"), steps=6)
    for bucket in (3, 0, 5):
        detour.put(detour.contents(bucket))
    use(detour, range(5000, 9000))
    detour.drop(np.arange(5000, 9000), NO_IDS)
    assert all(same(straight.contents(bucket), detour.contents(bucket)) for bucket in range(8))


def test_a_copy_does_not_change_with_the_table() -> None:
    held = _trained(spec())
    before = held.contents(2)
    kept = b"".join(before.pieces())
    use(held, before.ids, np.ones((before.ids.size, 4), np.float32))
    assert b"".join(before.pieces()) == kept
    assert not same(held.contents(2), before)


def test_put_replaces_what_a_bucket_held() -> None:
    held = _trained(spec(life=RowLife(admit_after=2)))
    old = held.contents(2)
    others = [held.contents(bucket) for bucket in range(8) if bucket != 2]
    use(held, range(1000))
    use(held, range(1000))
    held.put(old)
    assert same(held.contents(2), old)
    assert held.rows > 1000 - 300
    for contents in others:
        held.put(contents)
    assert held.rows == sum(contents.ids.size for contents in [old, *others])


def test_a_forgotten_bucket_is_empty_and_not_here() -> None:
    held = _trained(spec())
    contents = held.contents(2)
    expected = values(table(spec()), contents.ids)
    held.forget(2)
    assert held.contents(2).ids.size == 0
    assert values(held, contents.ids).tobytes() == expected.tobytes()
    with pytest.raises(InvalidRequest, match="another shard"):
        held.check_here(contents.ids)
    held.put(contents)
    held.check_here(contents.ids)


def test_an_empty_bucket_is_sent() -> None:
    held = table(spec(life=_LIFE))
    contents = _sent(held, 1)
    assert contents.nbytes == 0
    held.put(contents)
    assert held.rows == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"width": 3}, "row width"),
        ({"rows": 1}, "payload bytes"),
        ({"waiting": 900}, "payload bytes"),
        ({"payload_bytes": 1}, "payload bytes"),
        ({"bucket": 8}, "bucket number"),
        ({"bucket": 1}, "ids of this bucket"),
        ({"updates": MAX_UPDATES + 1}, "number of updates"),
        ({"updates": (1 << 64) - 1}, "number of updates"),
    ],
)
def test_contents_that_are_not_what_was_announced_are_refused(change: dict[str, int], what: str) -> None:
    contents = _trained(spec(life=_LIFE)).contents(0)
    header = replace(contents.header(0), **change)
    with pytest.raises(InvalidRequest, match=what):
        BucketContents.read(spec(life=_LIFE), header, memoryview(b"".join(contents.pieces())))


def test_contents_with_an_id_twice_are_refused() -> None:
    contents = _trained(spec()).contents(0)
    contents.ids[1] = contents.ids[0]
    with pytest.raises(InvalidRequest, match="different ids"):
        BucketContents.read(spec(), contents.header(0), memoryview(b"".join(contents.pieces())))


def test_a_payload_cut_short_is_refused() -> None:
    contents = _trained(spec()).contents(0)
    with pytest.raises(InvalidRequest, match="payload"):
        BucketContents.read(spec(), contents.header(0), memoryview(b"".join(contents.pieces()))[:-4])
