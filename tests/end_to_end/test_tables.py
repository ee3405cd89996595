"""Tables with real shards: what torch's own embeddings give, in every mode, on any number of shards."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, InvalidRequest, ModelMismatch, NonFiniteGradient, TableFull
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster, rows
from ps_worker.tables import EmbeddingBag, EmbeddingBags, Table
from tests.end_to_end.training import run_workers
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

DIM = 3
ROWS = 40
#: What ids stand for the rows of the reference.
IDS = torch.cat([torch.arange(30) * 7919 - 50, torch.tensor([2**63 - 1, -(2**63), *range(10**15, 10**15 + 8)])])
TOP = 0.2

Batch = tuple[torch.Tensor, torch.Tensor]
"""Places of ids in ``IDS``, 1-D, and the offsets of the bags."""


class Model(nn.Module):
    """Two features, on one table or two, below a dense layer."""

    def __init__(self, one: Callable[..., Any], two: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = one, two
        self.top = nn.Linear(2 * DIM, 1)
        with torch.no_grad():
            for parameter in self.top.parameters():
                parameter.fill_(0.3)

    def forward(self, one: Batch, two: Batch) -> torch.Tensor:
        result: torch.Tensor = self.top(torch.cat([self.one(*one), self.two(*two)], 1))
        return result


def batch(generator: torch.Generator, bags: int = 4) -> Batch:
    """Bags with duplicates and empty ones, in a power law."""
    sizes = torch.randint(0, 5, (bags,), generator=generator)
    places = (torch.rand(int(sizes.sum()), generator=generator) ** 3 * ROWS).long()
    return places, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])


def steps_of(seed: int, steps: int, workers: int) -> list[list[tuple[Batch, Batch]]]:
    generator = torch.Generator().manual_seed(seed)
    return [[(batch(generator), batch(generator)) for _ in range(workers)] for _ in range(steps)]


def with_ids(batch: Batch) -> Batch:
    return IDS[batch[0]], batch[1]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def on_shards(cluster: Cluster, mode: str, optimizer: rows.RowOptimizer, shared: bool) -> Model:
    one = cluster.embedding_bag(DIM, name="one", mode=mode, optimizer=optimizer)
    two = (
        cluster.embedding_bag(one, mode=mode)
        if shared
        else cluster.embedding_bag(DIM, name="two", mode=mode, optimizer=optimizer)
    )
    return Model(one, two)


def read(*bags: EmbeddingBag) -> list[torch.Tensor]:
    """All rows of each table."""
    with torch.no_grad():
        return [bag(IDS[:, None]).clone() for bag in bags]


class NaiveRows(torch.optim.Optimizer):
    """Row-wise Adagrad and FTRL, for which torch has no class, row by row as the papers write them."""

    def __init__(self, parameters: Iterable[torch.Tensor], settings: rows.RowWiseAdagrad | rows.FTRL) -> None:
        super().__init__(parameters, {})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.coalesce()
            for row, values in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
                state = self.state[parameter].setdefault(row, {})
                update = self._adagrad if isinstance(self._settings, rows.RowWiseAdagrad) else self._ftrl
                update(parameter[row], values, state)

    def _adagrad(self, row: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        state["sum"] = state.get("sum", self._settings.initial) + gradient.square().mean()
        row -= self._settings.lr * gradient / (state["sum"].sqrt() + self._settings.eps)

    def _ftrl(self, row: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        own = self._settings
        before = state.get("n", torch.full_like(row, own.initial))
        after = before + gradient.square()
        sigma = (after.pow(-own.power) - before.pow(-own.power)) / own.lr
        linear = state.get("z", torch.zeros_like(row)) + gradient - sigma * row
        curve = (own.beta + after.pow(-own.power)) / own.lr + 2 * own.l2
        shrunk = linear.sign() * (linear.abs() - own.l1).clamp(min=0)
        row.copy_(-shrunk / curve)
        state["n"], state["z"] = after, linear


OPTIMIZERS: dict[str, tuple[rows.RowOptimizer, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (rows.SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "adagrad": (
        rows.Adagrad(lr=0.5, initial=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.5, initial_accumulator_value=0.1),
    ),
    "adam": (rows.Adam(lr=0.05), lambda p: torch.optim.SparseAdam(p, lr=0.05)),
    "rowwise": (rows.RowWiseAdagrad(lr=0.5, initial=0.1), lambda p: NaiveRows(p, rows.RowWiseAdagrad(0.5, 0.1))),
    "ftrl": (rows.FTRL(lr=0.5, l1=0.01, l2=0.02), lambda p: NaiveRows(p, rows.FTRL(0.5, l1=0.01, l2=0.02))),
}


def reference(
    weights: list[torch.Tensor], mode: str, kind: str, shared: bool, steps: list[list[tuple[Batch, Batch]]]
) -> list[torch.Tensor]:
    """One process on the mean of the workers' losses; the rows it ends with, and the dense parameters."""
    sparse = mode != "max"
    one = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, _weight=weights[0].clone())
    two = one if shared else nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, _weight=weights[-1].clone())
    model = Model(one, two)
    own = [one.weight] if shared else [one.weight, two.weight]
    optimizers = [torch.optim.SGD(model.top.parameters(), lr=TOP), OPTIMIZERS[kind][1](own)]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model(*pair)) / len(step) for pair in step).backward()
        for number, parameter in enumerate(own):
            if not sparse:
                # torch has no sparse gradients of maxima; a row that was in a bag is used, whether it was the largest.
                used = torch.cat([pair[f][0] for pair in step for f in ((0, 1) if shared else (number,))]).unique()
                parameter.grad = torch.sparse_coo_tensor(
                    used[None], parameter.grad[used], parameter.shape, check_invariants=True
                )
        with torch.sparse.check_sparse_tensor_invariants():
            for optimizer in optimizers:
                optimizer.step()
    return [*(p.detach() for p in own), *(p.detach() for p in model.top.parameters())]


def train(cluster: Cluster, model: Model, optimizer: torch.optim.Optimizer, mine: list[tuple[Batch, Batch]]) -> None:
    for one, two in mine:
        optimizer.zero_grad()
        loss_of(model(with_ids(one), with_ids(two))).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("shards", "workers", "consistency"),
    [
        (1, 1, Consistency(Mode.ASYNC)),
        (2, 2, Consistency(Mode.SYNC)),
        (3, 1, Consistency(Mode.SSP, staleness=1)),
        (3, 2, Consistency(Mode.SYNC)),
    ],
)
def test_training_is_torch_s_training_whatever_the_shards_the_optimizer_and_the_mode(
    shards: int, workers: int, consistency: Consistency
) -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    chance = random.Random(seed)
    jobs = [(kind, chance.choice(["sum", "mean", "max"]), chance.random() < 0.5) for kind in OPTIMIZERS]

    def work(cluster: Cluster) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        results = []
        for number, (kind, mode, shared) in enumerate(jobs):
            steps = steps_of(seed + number, 6, workers)
            model = on_shards(cluster, mode, OPTIMIZERS[kind][0], shared)
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP, name=kind)
            tables = [model.one] if shared else [model.one, model.two]
            first = read(*tables)
            cluster.barrier()
            train(cluster, model, optimizer, [step[cluster.rank] for step in steps])
            cluster.barrier()
            results.append((first, [*read(*tables), *(p.detach().clone() for p in model.top.parameters())]))
        return results

    with running_job(shards, workers, consistency=consistency) as job:
        found = run_workers(job, workers, work)
    for number, (kind, mode, shared) in enumerate(jobs):
        first, last = found[0][number]
        expected = reference(first, mode, kind, shared, steps_of(seed + number, 6, workers))
        print(f"{kind}, {mode}, {'one table' if shared else 'two tables'}")
        for mine, theirs in zip(last, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other[number][1], last, strict=True))


def test_in_sync_any_number_of_shards_gives_bitwise_the_same_rows() -> None:
    steps = steps_of(5, 5, 2)

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = on_shards(cluster, "sum", rows.Adam(lr=0.05), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        train(cluster, model, optimizer, [step[cluster.rank] for step in steps])
        cluster.barrier()
        return read(model.one, model.two)

    results = []
    for shards in (1, 2, 3):
        with running_job(shards, 2, consistency=Consistency(Mode.SYNC)) as job:
            results.append(run_workers(job, 2, work)[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("transport", ["grpc", "bulk", "shm"])
@pytest.mark.parametrize("many", [50, 40_000])
def test_rows_travel_by_every_transport_in_messages_and_behind_them(transport: str, many: int) -> None:
    with running_job(2) as job:
        cluster = job.cluster(transport=transport)
        bag = cluster.embedding_bag(8, name="t", mode="sum", optimizer=rows.SGD(lr=1.0))
        model = nn.ModuleList([bag, nn.Linear(300, 100)])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        ids = torch.arange(many)[:, None] * 31
        before = bag(ids)
        (before.sum() + model[1](torch.ones(1, 300)).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(bag(ids), before - 1)
        assert {stream.transport for stream in optimizer._model.pipeline.streams.all} == {transport}


def test_rows_are_asked_for_ahead_under_ssp_and_the_bound_holds_for_them() -> None:
    """Worker 1 stands still: worker 0 may have one step more, and rows of the step behind that wait for it."""
    steps, done = steps_of(3, 4, 1), []

    def work(cluster: Cluster) -> None:
        model = on_shards(cluster, "sum", rows.SGD(lr=0.5), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        if cluster.rank == 1:
            wait_until(lambda: len(done) == 1)
            return
        pairs = [(with_ids(one), with_ids(two)) for ((one, two),) in steps]
        for one, two in cluster.prefetch(pairs, lambda pair: {model.one: pair[0][0], model.two: pair[1][0]}):
            optimizer.zero_grad()
            loss_of(model(one, two)).backward()
            optimizer.step()
            done.append(optimizer.last.clock)

    with running_job(2, 2, consistency=Consistency(Mode.SSP, staleness=1)) as job:
        run_workers(job, 2, work)
    assert done == [1, 2, 3, 4]


def test_prefetch_under_sync_trains_as_without_it() -> None:
    steps = steps_of(8, 5, 1)

    def work(cluster: Cluster, ahead: bool) -> list[torch.Tensor]:
        model = on_shards(cluster, "mean", rows.Adagrad(lr=0.5), shared=True)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        pairs: Any = [(with_ids(one), with_ids(two)) for ((one, two),) in steps]
        if ahead:
            pairs = cluster.prefetch(pairs, lambda pair: {model.one: pair[0][0], model.two: pair[1][0]})
        for one, two in pairs:
            optimizer.zero_grad()
            loss_of(model(one, two)).backward()
            optimizer.step()
        return read(model.one)

    results = []
    for ahead in (False, True):
        with running_job(2, consistency=Consistency(Mode.SYNC)) as job:
            results.append(run_workers(job, 1, lambda cluster, ahead=ahead: work(cluster, ahead))[0])
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("lease", [False, True])
def test_leased_data_is_not_taken_early(lease: bool) -> None:
    """A batch counts as trained when the next one is asked for."""
    taken = []

    def collate(items: list[int]) -> torch.Tensor:
        taken.append(items)
        return torch.tensor(items)[:, None]

    with running_job(1) as job:
        cluster = job.cluster()
        model = nn.ModuleList([cluster.embedding_bag(DIM, name="t", mode="sum")])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        loader: DataLoader[Any] = DataLoader(range(12), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        early = []
        for number, ids in enumerate(cluster.prefetch(cluster.shard(loader, lease=lease), lambda ids: {model[0]: ids})):
            early.append(len(taken) - number - 1)
            model[0](ids).sum().backward()
            optimizer.step()
        assert early == ([0] * 4 if lease else [1, 1, 1, 0])


_SEEDED = threading.Lock()
"""Held while values are drawn: workers are threads here, and the generator is one."""


class Old(nn.Module):
    """As a model was before there were tables."""

    def __init__(self) -> None:
        super().__init__()
        with _SEEDED:
            torch.manual_seed(1)
            self.user = nn.Embedding(60, 4, padding_idx=0)
            self.item = nn.EmbeddingBag(50, 4, mode="sum")
            self.small = nn.Embedding(5, 4)
            self.same = nn.Embedding(60, 4)
        self.same.weight = self.user.weight

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        result = self.user(user) * self.item(item) + self.small(user % 5) + self.same(user)
        return result.sum(1)


def test_a_converted_model_begins_and_trains_as_before() -> None:
    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randint(1, 60, (7,), generator=generator), torch.randint(50, (7, 3), generator=generator))
        for _ in range(4)
    ]
    plain = Old()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    outputs = []
    for user, item in data:
        optimizer.zero_grad()
        outputs.append(plain(user, item))
        outputs[-1].mean().backward()
        optimizer.step()

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = cluster.convert_embeddings(Old(), min_rows=50, optimizer=rows.SGD(lr=0.1))
        assert [name for name, _ in model.named_parameters()] == ["small.weight"]
        assert model.user.tables == model.same.tables
        own, found = cluster.optimizer(torch.optim.SGD, model, lr=0.1), []
        assert model.user.tables[0].initial is None
        for user, item in data:
            own.zero_grad()
            found.append(model(user, item))
            found[-1].mean().backward()
            own.step()
        return found

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        for found in run_workers(job, 2, work):
            for mine, theirs in zip(found, outputs, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_an_evaluator_reads_rows_as_they_are() -> None:
    with running_job(2, 1) as job:
        cluster = job.cluster()
        model = on_shards(cluster, "sum", rows.SGD(lr=0.5), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        evaluator = job.cluster(Role.EVALUATOR)
        copy = on_shards(evaluator, "sum", rows.SGD(lr=0.5), shared=False)
        versions = evaluator.follow(copy, min_interval_seconds=0.01)
        next(versions)
        train(cluster, model, optimizer, [step[0] for step in steps_of(1, 3, 1)])
        assert next(versions) == 3
        for mine, theirs in zip(read(copy.one, copy.two), read(model.one, model.two), strict=True):
            assert torch.equal(mine, theirs)
        other = Model(evaluator.embedding_bag(DIM, name="one"), evaluator.embedding_bag(5, name="three"))
        with pytest.raises(
            ModelMismatch, match="table 'two' is missing here; table 'three' is not in the declared model"
        ):
            next(evaluator.follow(other))
        many = torch.arange(700_000)[:, None]
        with torch.no_grad():
            assert copy.one(many).shape == (700_000, DIM)


def test_workers_that_declare_a_table_differently_are_told(tmp_path: Any) -> None:
    def work(cluster: Cluster) -> str:
        model = nn.ModuleList([cluster.embedding(3 if cluster.rank == 0 else 4, name="t")])
        if cluster.rank == 1:
            wait_until(lambda: "model" in cluster._session.view.models)
        try:
            cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        except ModelMismatch as error:
            return str(error)
        return ""

    with running_job(1, 2) as job:
        _, second = run_workers(job, 2, work)
    assert "'t'" in second


def test_bad_rows_are_refused_by_name_and_training_goes_on() -> None:
    with running_job(2) as job:
        cluster = job.cluster()
        full = cluster.embedding_bag(2, name="full", mode="sum", max_rows=256, optimizer=rows.SGD(lr=1.0))
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([full]), lr=0.1)
        (full(torch.tensor([[1]])) * float("nan")).sum().backward()
        with pytest.raises(NonFiniteGradient, match="full"):
            optimizer.step()
        optimizer.zero_grad()
        full(torch.arange(2000)[:, None]).sum().backward()
        with pytest.raises(TableFull, match="full"):
            optimizer.step()
        optimizer.zero_grad()
        before = full(torch.tensor([[1]]))
        before.sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(full(torch.tensor([[1]])), before - 1)
        other = cluster.embedding_bags({"a": Table(2, name="a")})
        with pytest.raises(ConfigError, match="prefetch"):
            cluster.optimizer(torch.optim.SGD, other, lr=0.1, name="other", overlap=True)
        with pytest.raises(InvalidRequest, match="another model"):
            cluster.optimizer(torch.optim.SGD, EmbeddingBags({"f": full}), lr=0.1, name="third")
