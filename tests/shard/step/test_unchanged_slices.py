"""Which slices an answer leaves out: those that the worker holds as they are."""

from __future__ import annotations

import torch

from ps_protocol.model.layout import Layout
from ps_server.shard.step.published import LastChanges, UnchangedSlices
from tests.support.seeds import seeded
from tests.support.shards import (
    StubStream,
    flat,
    gradients,
    in_slices,
    load,
    running_shard,
    simple_spec,
    start,
    whole_map,
)

LAYOUT = Layout.of(whole_map(simple_spec((2,), (3,), (4,), (5,))), 0)
ALL = frozenset(range(LAYOUT.parameter_slices))


def test_a_worker_that_keeps_nothing_is_sent_everything() -> None:
    changes = LastChanges(LAYOUT)
    kept = UnchangedSlices(changes, keeps=False, differences=False)
    kept.sent(changes.number, raw=False)
    assert kept.unchanged() == ()


def test_a_stream_begins_with_everything_and_leaves_out_what_has_not_changed() -> None:
    changes = LastChanges(LAYOUT)
    kept = UnchangedSlices(changes, keeps=True, differences=False)
    assert kept.unchanged() == ()
    kept.sent(changes.number, raw=False)
    assert kept.unchanged() == tuple(ALL)
    changes.record(frozenset({0, 2}))
    assert kept.unchanged() == (0, 2)
    changes.record(None)
    assert kept.unchanged() == (0, 2)
    changes.record(frozenset())
    assert kept.unchanged() == ()


def test_what_changes_while_an_answer_is_on_its_way_is_in_the_next() -> None:
    changes = LastChanges(LAYOUT)
    kept = UnchangedSlices(changes, keeps=True, differences=False)
    number = changes.number
    changes.record(ALL - {1})
    kept.sent(number, raw=False)
    assert kept.unchanged() == tuple(sorted(ALL - {1}))


def test_with_differences_only_what_came_raw_is_whole() -> None:
    changes = LastChanges(LAYOUT)
    kept = UnchangedSlices(changes, keeps=True, differences=True)
    kept.sent(changes.number, raw=True)
    changes.record(ALL - {1})
    kept.sent(changes.number, raw=False)
    assert kept.unchanged() == tuple(sorted(ALL - {1}))
    kept.sent(changes.number, raw=True)
    assert kept.unchanged() == tuple(ALL)


def test_random_changes_against_a_list_of_versions() -> None:
    chance = seeded()
    changes, versions = LastChanges(LAYOUT), [0] * len(ALL)
    held = {UnchangedSlices(changes, keeps=True, differences=False): [-1] * len(ALL) for _ in range(3)}
    for _ in range(2000):
        if chance.random() < 0.5:
            untouched = chance.choice([frozenset(), None, frozenset(chance.sample(sorted(ALL), chance.randint(1, 4)))])
            changes.record(untouched)
            for index in ALL - (ALL if untouched is None else untouched):
                versions[index] += 1
        else:
            kept, own = chance.choice(list(held.items()))
            unchanged = kept.unchanged()
            for index in ALL:
                if index in unchanged:
                    assert own[index] == versions[index]
                own[index] = versions[index]
            kept.sent(changes.number, raw=False)
            assert kept.unchanged() == tuple(ALL)


def receive(stream: StubStream, held: list[torch.Tensor], layout: Layout) -> int:
    """Take the next result into ``held``; returns how many slices it left out."""
    result, payload = stream.result()
    present = [i for i in range(layout.parameter_slices) if i not in result.absent]
    spans = [layout.slices[index] for index in present]
    assert len(payload) == sum(span.padded_end - span.begin for span in spans)
    position = 0
    for index, span in zip(present, spans, strict=True):
        part = bytearray(payload[position : position + span.end - span.begin])
        held[index] = torch.frombuffer(part, dtype=torch.float32).reshape(span.shape)
        position += span.padded_end - span.begin
    return len(result.absent)


def test_random_pushes_loads_and_lost_streams_leave_each_worker_with_the_shard_s_values() -> None:
    chance = seeded()
    left_out = 0
    with running_shard({0: 1, 1: 2}) as shard:
        model, initial = start(shard, (4, 3), (5,), (2, 2), (7,))
        layout, values = model.layout, [tensor.clone() for tensor in initial]
        streams = [StubStream(shard, rank, rank + 1, keeps_slices=True) for rank in range(2)]
        held = [[torch.full_like(tensor, float("nan")) for tensor in values] for _ in streams]
        for number in range(50):
            rank = chance.randrange(2)
            if chance.random() < 0.1:
                streams[rank].cancel()
                streams[rank] = StubStream(shard, rank, rank + 1, keeps_slices=True)
                held[rank] = [torch.full_like(tensor, float("nan")) for tensor in values]
            if chance.random() < 0.1:
                values = gradients(model, 1000 + number)
                assert load(shard, model, flat(layout, *values)).written
            absent = sorted(chance.sample(range(4), chance.randrange(5)))
            pushed = [None if i in absent else g for i, g in enumerate(gradients(model, number))]
            streams[rank].push(in_slices(g for g in pushed if g is not None), absent=absent)
            values = [v if g is None else v - 0.1 * g for v, g in zip(values, pushed, strict=True)]
            left_out += receive(streams[rank], held[rank], layout)
            for found, wanted in zip(held[rank], values, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert left_out > 0
