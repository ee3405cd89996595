"""Lookups and pushes of rows through broken streams, errors, moves of buckets, and rows asked for ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, ModelMoved, Unavailable
from ps_worker import Outcome, rows
from ps_worker.tables import Embedding, EmbeddingBag, EmbeddingBags, Table
from ps_worker.tables.prefetch import Prefetch
from tests.support.seeds import drawn_seed
from tests.worker.fakes import FakeSession
from tests.worker.tables.table_training import Clicks, assert_same, batches, declare, in_torch, on_shards, train


def prefetched(session: FakeSession, model: Clicks, ids: list[torch.Tensor]) -> Prefetch[torch.Tensor]:
    return Prefetch(ids, lambda batch: {model.bag: batch}, lambda: [model.bag], lambda: session.lookahead)


# -- joining


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_worker_that_joins_at_different_positions_tells_the_shard_that_has_it_lower(
    session: FakeSession, ahead: int
) -> None:
    train(*on_shards(session), batches(2))
    session.shards[ahead].stand = (0, 4)
    for shard in session.shards:
        shard.faults.hold_ahead = True
    late = session.join(rank=1)
    # Rows for its first push, step 5, come after step 4: the other shard has it at step 2.
    train(*on_shards(late), batches(1))
    opened = [[each.clock for each in shard.opens if each.worker.rank == 1] for shard in session.shards]
    assert opened[ahead] == [0]
    assert opened[1 - ahead] == [0, 4]
    assert [shard.pushes[-1].clock for shard in session.shards] == [5, 5]
    late.close()


# -- positions


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_worker_whose_push_is_late_on_one_shard_tells_the_other_where_it_goes_on(
    session: FakeSession, ahead: int
) -> None:
    model, optimizer = on_shards(session)
    for shard in session.shards:
        shard.faults.hold_ahead = True
    session.shards[ahead].faults.late = [4]
    # Rows for its next push, step 5, come after step 4: the other shard has it at step 1.
    train(model, optimizer, batches(2))
    opened = [[each.clock for each in shard.opens[1:]] for shard in session.shards]
    assert (opened[ahead], opened[1 - ahead]) == ([], [4])
    assert [shard.pushes[-1].clock for shard in session.shards] == [5, 5]


@pytest.mark.timeout(60)
def test_a_shard_that_refused_a_push_does_not_let_the_rows_for_the_next_one_wait_for_it(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    for shard in session.shards:
        shard.faults.hold_ahead = True
    session.shards[0].faults.refuse = [InvalidRequest("not like this")]
    with pytest.raises(InvalidRequest, match="not like this"):
        train(model, optimizer, batches(1))
    train(model, optimizer, batches(1))
    assert [[each.clock for each in shard.opens[1:]] for shard in session.shards] == [[1], []]
    assert [shard.pushes[-1].clock for shard in session.shards] == [2, 2]


# -- broken streams


def test_a_lookup_lost_with_its_stream_is_asked_again(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    train(model, optimizer, batches(1))
    session.shards[0].faults.lose_lookup = 2
    session.shards[1].faults.lose_lookup = 1
    train(model, optimizer, batches(2, seed=1))
    train(reference, plain, batches(1) + batches(2, seed=1))
    assert_same(model, reference)
    assert [len(shard.opens) for shard in session.shards] == [3, 2]
    assert session.hints


@pytest.mark.parametrize("fault", ["lose_push", "lose_reply"])
def test_a_push_of_rows_is_applied_once_through_broken_streams(session: FakeSession, fault: str) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    for shard in session.shards:
        setattr(shard.faults, fault, 2)
    train(model, optimizer, batches(3))
    train(reference, plain, batches(3))
    assert_same(model, reference)
    lost = [push for push in session.shards[0].pushes if push.sequence == 1]
    if fault == "lose_push":
        assert [list(push.tables) for push in lost] == [list(lost[0].tables)] * 3
    else:
        # The shard has it: only the header goes again.
        assert [bool(push.tables) for push in lost] == [True, False, False]


def test_an_error_in_the_answer_is_raised_and_the_stream_goes_on(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    train(model, optimizer, batches(1))
    session.shards[1].faults.on_lookup = [lambda: InvalidRequest("no such table")]
    with pytest.raises(InvalidRequest, match="no such table"):
        model(batches(1)[0])
    train(model, optimizer, batches(1))
    assert len(session.shards[1].opens) == 1


def test_a_shard_that_stays_away_is_waited_for_as_long_as_said(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    train(model, optimizer, batches(1))
    pipeline = optimizer._model.pipeline
    pipeline.reconnect_timeout_seconds = 0.3
    session.shards[1].stop()
    with pytest.raises(Unavailable, match="gave up"):
        model(batches(1)[0])
    session.shards[1].serve()
    pipeline.reconnect_timeout_seconds = 60.0
    train(model, optimizer, batches(1))


def test_training_with_random_faults_is_training_without(session: FakeSession) -> None:
    seed = drawn_seed()
    chance = random.Random(seed)
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    steps = batches(12, seed=seed)
    session.lookahead = 0
    for batch in steps:
        for shard in session.shards:
            setattr(shard.faults, chance.choice(["lose_lookup", "lose_push", "lose_reply"]), chance.randrange(2))
        train(model, optimizer, prefetched(session, model, [batch]) if chance.random() < 0.5 else [batch])
        if chance.random() < 0.2:
            session.move({}, buckets=[[chance.randrange(2) for _ in range(16)]])
    for shard in session.shards:
        shard.faults.lose_lookup = shard.faults.lose_push = shard.faults.lose_reply = 0
    train(reference, plain, steps)
    assert_same(model, reference)


def test_a_restarted_shard_without_a_part_of_the_lookup_is_told_the_position_while_another_waits(
    session: FakeSession,
) -> None:
    model, optimizer = on_shards(session)
    moved(session, 1)
    train(model, optimizer, batches(1))
    restarted, holds = session.shards
    # It answers when the other shard knows this worker again, as where a third worker waits there for this one.
    holds.faults.hold_ahead, holds.stand = True, (0, 0)
    restarted.stop()
    restarted.serve()
    restarted.faults.on_open = lambda: setattr(holds, "stand", (0, 1))
    opens = len(restarted.opens)
    model(batches(1, seed=1)[0])
    assert [opened.clock for opened in restarted.opens[opens:]] == [1]


# -- moves


def moved(session: FakeSession, *owners: int) -> None:
    session.move({}, buckets=[[owners[bucket % len(owners)] for bucket in range(16)]])


def test_rows_follow_their_buckets(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    steps = batches(4)
    train(reference, plain, steps)
    train(model, optimizer, steps[:1])
    moved(session, 1)
    train(model, optimizer, steps[1:2])
    moved(session, 2, 0, 0)
    train(model, optimizer, steps[2:3])
    # Between the pass and the step.
    optimizer.zero_grad()
    model(steps[3]).square().mean().backward()
    moved(session, 0, 1)
    optimizer.step()
    assert_same(model, reference)


@pytest.mark.parametrize("told", ["in the answer", "at the end of the stream"])
def test_a_lookup_that_meets_a_move_is_split_again(session: FakeSession, told: str) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    train(model, optimizer, batches(1))
    train(reference, plain, batches(1))

    def move() -> ModelMoved | None:
        moved(session, 1, 1, 0)
        return ModelMoved("buckets have moved") if told == "in the answer" else None

    if told == "in the answer":
        session.shards[0].faults.on_lookup = [move]
    else:
        # The shard notices at the next lookup, before it answers.
        move()
        session.epoch = lambda model: 1  # type: ignore[method-assign]
    train(model, optimizer, batches(1, seed=4))
    train(reference, plain, batches(1, seed=4))
    assert_same(model, reference)


def test_a_push_of_rows_under_way_is_split_again_when_none_took_it(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    session.shards[0].faults.on_push = [lambda: (moved(session, 0, 0, 1), session.shards[0].faults.release.put(None))]
    session.shards[1].faults.lose_push = 1
    train(model, optimizer, batches(2))
    train(reference, plain, batches(2))
    assert_same(model, reference)


# -- rows asked for ahead


def test_without_lookahead_a_batch_is_asked_for_when_it_is_given_out(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    given: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(batches(3)):
            given.append(number)
            yield batch

    loop = Prefetch(loader(), lambda ids: {model.bag: ids}, list, lambda: session.lookahead)
    for number, batch in enumerate(loop):
        assert given[-1] == number
        train(model, optimizer, [batch])
    train(reference, plain, batches(3))
    assert_same(model, reference)
    assert [lookup.clock for lookup in session.shards[0].lookups[:3]] == [1, 2, 3]


def test_with_lookahead_the_next_batch_is_asked_for_before_this_one_is_given_out(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    session.lookahead = 1
    clocks = []
    for batch in prefetched(session, model, batches(4)):
        train(model, optimizer, [batch])
        clocks.append([lookup.clock for lookup in session.shards[0].lookups])
    assert clocks == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]
    # Each was answered before the push that it lacks.
    assert [push.clock for push in session.shards[0].pushes] == [1, 2, 3, 4]


def test_rows_asked_for_ahead_lack_the_worker_s_own_last_push(session: FakeSession) -> None:
    module = Embedding(4, name="t", optimizer=rows.SGD(lr=1.0))
    optimizer = declare(session, nn.ModuleList([module]))
    session.lookahead = 1
    ids, seen = torch.tensor([5]), []
    for batch in Prefetch([ids, ids, ids], lambda batch: {module: batch}, list, lambda: session.lookahead):
        found = module(batch)
        seen.append(found[0, 0].item())
        found.sum().backward()
        optimizer.step()
    assert [round(seen[0] - each, 4) for each in seen] == [0, 0, 1]


def test_all_tables_of_a_batch_go_in_one_message_per_shard(session: FakeSession) -> None:
    shared = Table(4, name="shared")
    bags = EmbeddingBags({"a": shared, "b": Table(4, name="b")})
    user, item = Embedding(4, name="user"), EmbeddingBag(shared)
    optimizer = declare(session, nn.ModuleList([bags, user, item]))
    many = torch.arange(40)

    def ids_of(batch: torch.Tensor) -> dict[Any, Any]:
        return {"a": batch[None], "b": batch[None] + 1, user: batch, item: batch[None] + 7}

    for batch in Prefetch([many], ids_of, lambda: optimizer._model.table_modules, lambda: 0):
        ids = {"a": batch[None], "b": batch[None] + 1}
        (sum(each.sum() for each in bags(ids).values()) + user(batch).sum() + item(batch[None] + 7).sum()).backward()
        optimizer.step()
    for shard in session.shards:
        [lookup] = shard.lookups
        assert [each.table for each in lookup.tables] == [0, 1, 2]
        assert len(shard.pushes[0].tables) == 3


@pytest.mark.parametrize("change", ["equal ids", "in place", "others"])
def test_rows_are_found_by_the_same_tensor_or_by_equal_ids(session: FakeSession, change: str) -> None:
    model, _ = on_shards(session)
    [batch] = batches(1)
    for ids in prefetched(session, model, [batch]):
        if change == "equal ids":
            ids = ids.clone()
        elif change == "in place":
            ids += 1
        else:
            ids = ids[:, :2]
        with torch.no_grad():
            found = model.bag(ids)
    assert len(session.shards[0].lookups) == {"equal ids": 1, "in place": 2, "others": 2}[change]
    with torch.no_grad():
        torch.testing.assert_close(found, model.bag(ids))


def test_rows_of_a_batch_serve_several_passes_but_none_after_the_step(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    for batch in prefetched(session, model, batches(1)):
        for _ in range(2):
            model(batch).square().mean().backward()
        assert len(session.shards[0].lookups) == 1
        optimizer.step()
        train(model, optimizer, [batch])
        assert len(session.shards[0].lookups) == 2
    for _ in range(2):
        reference(batches(1)[0]).square().mean().backward()
    plain.step()
    train(reference, plain, batches(1))
    assert_same(model, reference)


def test_a_loop_that_is_left_forgets_what_was_asked_for(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    session.lookahead = 1
    for batch in prefetched(session, model, batches(3)):
        train(model, optimizer, [batch])
        break
    train(model, optimizer, batches(1, seed=2))
    assert optimizer._model._tables._ready == []
    assert optimizer.last is not None
    assert optimizer.last.outcome is Outcome.APPLIED


def test_rows_asked_for_ahead_survive_a_broken_stream_and_a_move(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    session.lookahead = 1
    faults: list[Callable[[], Any]] = [
        lambda: None,
        lambda: setattr(session.shards[0].faults, "lose_push", 1),
        partial(moved, session, 1, 0, 0),
        lambda: setattr(session.shards[1].faults, "lose_lookup", 1),
        lambda: None,
    ]
    for batch, fault in zip(prefetched(session, model, batches(5)), faults, strict=True):
        fault()
        train(model, optimizer, [batch])
    assert optimizer.last is not None
    assert optimizer.last.clock == 5


def test_a_lookup_ahead_that_the_mode_does_not_let_come_any_more_is_asked_for_the_next_push(
    session: FakeSession,
) -> None:
    model, optimizer = on_shards(session)
    session.lookahead = 1
    loop = iter(prefetched(session, model, batches(2)))
    first = next(loop)
    second = batches(2)[1]
    # Gradients accumulate over both batches; meanwhile the mode becomes sync, and shards let lookups ahead wait.
    session.lookahead = 0
    for shard in session.shards:
        shard.faults.hold_ahead = True
    model(first).sum().backward()
    model(second).sum().backward()
    optimizer.step()
    assert session.shards[0].pushes[0].clock == 1
    loop.close()  # type: ignore[attr-defined]


def test_ids_that_belong_to_no_module_are_refused(session: FakeSession) -> None:
    model, _ = on_shards(session)
    loader = Prefetch([1], lambda _: {"age": torch.tensor([[1]])}, lambda: [model.bag], lambda: 0)
    with pytest.raises(InvalidRequest, match="age"):
        next(iter(loader))
    assert len(loader) == 1
