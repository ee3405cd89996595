"""Tables in the optimizer, as torch's own tools see them, and against torch's own optimizer in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ps_protocol.errors import ConfigError, InvalidRequest, ModelMismatch, NonFiniteGradient, TableFull
from ps_protocol.wire.convert.options import options_from_pb
from ps_worker import rows
from ps_worker.step.summary import StepSettings
from ps_worker.tables import Embedding, EmbeddingBag, EmbeddingBags, Table
from tests.worker.fakes import FakeSession, job
from tests.worker.tables.table_training import LR, all_rows, assert_same, batches, declare, in_torch, on_shards, train


@pytest.fixture(params=[1, 3])
def sharded(request: pytest.FixtureRequest) -> Iterator[FakeSession]:
    with job(shards=request.param) as sharded:
        yield sharded


def test_rows_and_variables_train_as_in_torch(sharded: FakeSession) -> None:
    model, optimizer = on_shards(sharded)
    reference, plain = in_torch()
    train(model, optimizer, batches(5))
    train(reference, plain, batches(5))
    assert_same(model, reference)


def test_one_lookup_per_shard_and_step_and_rows_are_sent_with_the_gradients(sharded: FakeSession) -> None:
    model, optimizer = on_shards(sharded)
    train(model, optimizer, batches(3))
    for shard in sharded.shards:
        assert [(lookup.phase, lookup.clock, lookup.now) for lookup in shard.lookups] == [
            (0, 1, False),
            (0, 2, False),
            (0, 3, False),
        ]
        assert [push.tables[0].rows for push in shard.pushes] == [each.tables[0].rows for each in shard.lookups]
    sent = sum(each.rows for shard in sharded.shards for push in shard.pushes for each in push.tables)
    assert sent == sum(len(batch.unique()) for batch in batches(3))


def test_a_model_may_have_tables_alone(session: FakeSession) -> None:
    model = nn.ModuleList([Embedding(4, name="t", optimizer=rows.SGD(lr=1.0))])
    optimizer = declare(session, model)
    before = model[0](torch.tensor([5, 6]))
    before.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[0](torch.tensor([5, 6])), before - 1)
    optimizer.pull()
    assert optimizer.state_dict()["state"] == {}


def test_several_tables_and_a_list_of_parameters(session: FakeSession) -> None:
    bags = EmbeddingBags(
        {"a": Table(3, name="a", optimizer=rows.SGD(lr=1.0)), "b": Table(5, name="b", optimizer=rows.SGD(lr=2.0))},
        mode="sum",
    )
    top = nn.Parameter(torch.ones(3))
    optimizer = declare(session, [top], tables=[bags])
    ids = {"a": torch.tensor([[1, 2]]), "b": torch.tensor([[3, 3]])}
    first = bags(ids)
    (first["a"] @ top + first["b"].sum()).sum().backward()
    optimizer.step()
    second = bags(ids)
    torch.testing.assert_close(second["a"], first["a"] - 2)
    torch.testing.assert_close(second["b"], first["b"] - 2 * 2 * 2)
    assert all(len(shard.lookups) <= 2 for shard in session.shards)
    assert [group.get("table") for group in optimizer.param_groups] == [None, "a", "b"]


def test_only_tables_with_a_gradient_take_part(session: FakeSession) -> None:
    one, other = Embedding(4, name="one"), Embedding(4, name="other")
    optimizer = declare(session, nn.ModuleList([one, other]))
    other(torch.tensor([1]))
    one(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.step()
    pushes = [[list(map(table_and_rows, push.tables)) for push in shard.pushes] for shard in session.shards]
    # A table with a gradient is named on every shard, also where it has no row; the second step has none.
    assert sorted(pushes) == [[[(0, 0)], []], [[(0, 1)], []]]


def table_and_rows(each: object) -> tuple[int, int]:
    return each.table, each.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["before the pass", "by the model", "between pass and backward"])
def test_zero_grad_takes_away_what_has_a_gradient_and_nothing_else(session: FakeSession, when: str) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    for module, own in ((model, optimizer), (reference, plain)):
        module(batches(1, seed=9)[0]).sum().backward()
        if when == "before the pass":
            own.zero_grad()
        if when == "by the model":
            module.zero_grad()
        loss = module(batches(1)[0]).square().mean()
        if when != "by the model":
            own.zero_grad()
        loss.backward()
        own.step()
    assert_same(model, reference)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_grad_scaler_unscales_rows_and_finds_what_is_not_finite_in_them(session: FakeSession, infinite: bool) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    for module, own in ((model, optimizer), (reference, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        hidden = module.bag(batches(1)[0])
        scaler.scale(hidden.sum() * (float("inf") if infinite else 1.0)).backward()
        scaler.step(own)
        scaler.update()
        assert scaler.get_scale() == (4.0 if infinite else 8.0)
    if infinite:
        assert session.shards[0].pushes == []
    assert_same(model, reference)


@pytest.mark.parametrize("found", ["in the model", "in the groups"])
def test_clipping_counts_rows_once_over_several_passes(session: FakeSession, found: str) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    reference.bag.sparse = False
    norms = []
    for module, own in ((model, optimizer), (reference, plain)):
        for batch in batches(3):
            (module(batch).square().sum() * 100).backward()
        groups = [p for group in own.param_groups for p in group["params"]]
        norms.append(nn.utils.clip_grad_norm_(module.parameters() if found == "in the model" else groups, 0.5))
        own.step()
    torch.testing.assert_close(norms[0], norms[1])
    assert_same(model, reference)


def test_a_pass_after_clipping_adds_to_what_was_clipped(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    reference.bag.sparse = False
    for module, own in ((model, optimizer), (reference, plain)):
        for batch in batches(3):
            module(batch).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        own.step()
    assert_same(model, reference)


def test_a_kept_graph_adds_to_rows_that_were_clipped(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    reference.bag.sparse = False
    for module, own in ((model, optimizer), (reference, plain)):
        losses = [module(batch).square().sum() for batch in batches(2)]
        for _ in range(2):
            for loss in losses:
                loss.backward(retain_graph=True)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        own.step()
    assert_same(model, reference)


def test_rows_are_in_no_state_dict_and_follow_no_cast(session: FakeSession) -> None:
    model, _ = on_shards(session)
    model(batches(1)[0]).sum().backward()
    assert [name for name, _ in model.named_parameters()] == ["bag.rows_of_t", "top.weight", "top.bias"]
    assert list(model.state_dict()) == ["top.weight", "top.bias"]
    model.load_state_dict(model.state_dict())
    [rows] = model.bag.parameters()
    model.bag.to(torch.float64)
    assert next(model.bag.parameters()) is rows
    assert rows.dtype is torch.float32
    assert not list(copy.deepcopy(model).bag.parameters())


@pytest.mark.parametrize("kind", ["step", "one cycle", "lambda"])
def test_a_scheduler_moves_the_rate_of_each_table(session: FakeSession, kind: str) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if kind == "step":
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if kind == "lambda":
            return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1 / (1 + step)])
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.4], total_steps=10, cycle_momentum=False)

    model, optimizer = on_shards(session)
    reference, plain = in_torch()
    for module, own in ((model, optimizer), (reference, plain)):
        schedule = scheduler(own)
        for batch in batches(4):
            train(module, own, [batch])
            schedule.step()
    assert_same(model, reference)


def test_one_cycle_cycles_the_momentum_of_a_model_with_tables_too(session: FakeSession) -> None:
    model, optimizer = on_shards(session, torch_class=torch.optim.Adam)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.4], total_steps=10)
    train(model, optimizer, batches(1))
    schedule.step()
    assert "betas" in optimizer.param_groups[0]


def test_options_of_tables_are_sent_when_they_change(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    for lr in (LR, LR, 0.25, 0.25):
        optimizer.param_groups[1]["lr"] = lr
        train(model, optimizer, batches(1))
    sent = [list(map(options_from_pb, push.table_arguments)) for push in session.shards[0].pushes]
    assert sent == [[], [], [{"lr": 0.25}], []]


def test_a_closure_may_look_rows_up(session: FakeSession) -> None:
    model, optimizer = on_shards(session)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batches(1)[0]).square().mean()
        loss.backward()
        return loss

    reference, plain = in_torch()
    optimizer.step(closure)
    train(reference, plain, batches(1))
    assert_same(model, reference)


def test_named_parameters_and_tables_go_together(session: FakeSession) -> None:
    bag = EmbeddingBag(4, name="t", optimizer=rows.SGD())
    top = nn.Linear(4, 1)
    optimizer = declare(session, list(top.named_parameters()), tables=[bag])
    top(bag(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][1]["table"] == "t"


def test_a_state_dict_keeps_the_options_of_tables_and_no_rows(session: FakeSession) -> None:
    model, optimizer = on_shards(session, momentum=0.9)
    train(model, optimizer, batches(2))
    model(batches(1)[0]).sum().backward()
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], []]
    assert set(saved["state"]) == {0, 1}
    saved["param_groups"][1]["lr"] = 0.125
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["lr"] == 0.125
    # The gradient of before is still to be pushed.
    assert len(optimizer.param_groups[1]["params"]) == 1
    optimizer.step()
    assert [len(push.tables) for push in session.shards[0].pushes] == [1, 1, 1]
    assert list(optimizer.param_groups[1]["params"]) == []


def test_a_state_dict_of_the_torch_class_leaves_tables_alone_and_one_of_other_tables_is_refused(
    session: FakeSession,
) -> None:
    model, optimizer = on_shards(session)
    plain = torch.optim.SGD(model.parameters(), lr=0.03)
    optimizer.load_state_dict(plain.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, LR]
    other = optimizer.state_dict()
    other["param_groups"][1]["table"] = "u"
    with pytest.raises(InvalidRequest, match="expected: t; actual: u"):
        optimizer.load_state_dict(other)


@pytest.mark.parametrize(("policy", "pushes"), [("refuse", 0), ("skip", 1), ("allow", 1)])
def test_rows_that_are_not_finite_are_dealt_with_by_policy(session: FakeSession, policy: str, pushes: int) -> None:
    model, optimizer = on_shards(session, nonfinite=policy)
    (model.bag(torch.tensor([[1, 2]])) * torch.tensor(float("nan"))).sum().backward()
    if policy == "refuse":
        with pytest.raises(NonFiniteGradient, match="variable: t"):
            optimizer.step()
    else:
        optimizer.step()
    for shard in session.shards:
        assert len(shard.pushes) == pushes
        assert all(push.skipped == (policy == "skip") and push.finite is False for push in shard.pushes)
        assert policy == "allow" or all(not push.tables for push in shard.pushes)


def test_large_finite_rows_are_no_infinity(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    (model.bag(torch.tensor([[1, 2]])) * 3e38).sum().backward()
    optimizer.step()
    assert session.shards[0].pushes[0].finite


def test_what_a_shard_refuses_is_raised_and_the_next_step_goes_on(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    session.shards[1].faults.refuse = [TableFull("table 't' is full", variable="t")]
    with pytest.raises(TableFull):
        train(model, optimizer, batches(1))
    train(model, optimizer, batches(1))
    assert [push.sequence for push in session.shards[1].pushes] == [1, 2]


def test_overlap_and_tables_do_not_go_together(session: FakeSession) -> None:
    with pytest.raises(ConfigError, match=r"cluster.prefetch"):
        on_shards(session, style=StepSettings(overlap=True))
    assert session.shards == []


def test_a_parameter_in_the_place_of_a_module_is_refused(session: FakeSession) -> None:
    with pytest.raises(InvalidRequest, match="modules"):
        declare(session, [nn.Parameter(torch.ones(2))], tables=[Table(2, name="t")])


def test_the_seed_is_the_job_s_unless_the_table_has_its_own(session: FakeSession) -> None:
    declare(session, nn.ModuleList([Embedding(2, name="a"), Embedding(2, name="b", seed=4)]))
    assert [table.seed for table in session.shard_map("model").spec.tables] == [11, 4]


def test_closing_ends_the_use_of_rows(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    optimizer._model.close()
    with pytest.raises(InvalidRequest, match="closed"):
        all_rows(model.bag)


def test_an_empty_step_brings_no_rows_and_keeps_those_of_the_next(session: FakeSession) -> None:
    model, optimizer = on_shards(session)
    model(batches(1)[0]).sum().backward()
    optimizer._model.no_op_step()
    optimizer.step()
    for shard in session.shards:
        assert [(push.skipped, len(push.tables), list(push.table_arguments)) for push in shard.pushes] == [
            (True, 0, []),
            (False, 1, []),
        ]


def test_a_model_that_was_refused_may_be_declared_again(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleList([Embedding(4, name="t")])
    with monkeypatch.context() as patch:
        patch.setattr(FakeSession, "declare", lambda self, spec: _refuse())
        with pytest.raises(ModelMismatch):
            declare(session, module)
    declare(session, module)
    module[0](torch.tensor([1]))


def _refuse() -> None:
    raise ModelMismatch("another model")
