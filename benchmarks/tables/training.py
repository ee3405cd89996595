"""A training step with look-up and update, beside the same step in one process of plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.tables.click_model import FEATURES, IDS, SAMPLES, Batch, ClickModel, LocalBags, batches, train
from benchmarks.tables.ids import DIM
from benchmarks.timing import Loop
from ps_worker import rows
from ps_worker.tables import Table

SYSTEM = "one process of plain torch"
SGD, ADAGRAD = "SGD", "Adagrad"
OPTIMIZERS = (SGD, ADAGRAD)

_MODE = ("--mode", "ssp", "--staleness", "1")
_BATCHES = 16
_ROW_LR = 0.05


def local_key(optimizer: str) -> Key:
    """The step in one process."""
    return Key(SYSTEM, f"click model, {optimizer}", 0)


def key(transport: str, optimizer: str, *, prefetched: bool) -> Key:
    """The same step with tables on a shard."""
    return Key(ours.system(transport), f"click model, {optimizer}" + ", prefetched" * prefetched, 0)


def local_subject(optimizer: str, samples: int = SAMPLES, ids: int = IDS) -> Subject:
    """Seconds of a step with ``nn.EmbeddingBag(sparse=True)``."""
    name = local_key(optimizer)

    @contextmanager
    def opened() -> Iterator[Crew]:
        with Child(local_worker, name.operation, optimizer, samples, ids) as child:
            child.ready()
            yield Crew([child])

    return Subject((name,), opened)


def subject(transport: str, optimizer: str, samples: int = SAMPLES, ids: int = IDS) -> Subject:
    """Seconds of a step with tables on one shard, in mode ssp(1), with and without ``cluster.prefetch``."""
    keys = tuple(key(transport, optimizer, prefetched=prefetched) for prefetched in (False, True))

    @contextmanager
    def opened() -> Iterator[Crew]:
        with ExitStack() as stack:
            cluster = stack.enter_context(running_cluster(mode=_MODE))
            names = tuple(each.operation for each in keys)
            child = stack.enter_context(Child(worker, cluster.address, transport, names, optimizer, samples, ids))
            child.ready()
            yield Crew([child], cluster.shards)

    return Subject(keys, opened)


@contextmanager
def local_worker(operation: str, optimizer: str, samples: int, ids: int) -> Iterator[Loop]:
    """The role of the process without a cluster."""
    # Torch warns once unless this is said.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    bags = LocalBags(ids)
    model = ClickModel(bags)
    of_tables = list(bags.parameters())
    dense = torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.01)
    sparse: torch.optim.Optimizer
    sparse = torch.optim.SGD(of_tables, lr=_ROW_LR) if optimizer == SGD else torch.optim.Adagrad(of_tables, lr=_ROW_LR)
    endless = itertools.cycle(batches(_BATCHES, samples, ids))
    yield Loop({operation: lambda: train(model, next(endless), dense, sparse)})


@contextmanager
def worker(
    address: str, transport: str, operations: tuple[str, str], optimizer: str, samples: int, ids: int
) -> Iterator[Loop]:
    """The role of the process that trains with tables on the shard. ``operations``: without, and with prefetching."""
    with ours.connected(address, 0, transport) as connection, ours.undisturbed() as check:
        row_optimizer = rows.SGD(lr=_ROW_LR) if optimizer == SGD else rows.Adagrad(lr=_ROW_LR)
        tables = {name: Table(DIM, name=name, optimizer=row_optimizer) for name in FEATURES}
        model = ClickModel(connection.embedding_bags(tables, mode="sum"))
        dense = connection.optimizer(torch.optim.SGD, model, lr=0.01)
        made = batches(_BATCHES, samples, ids)
        for batch in made:
            train(model, batch, dense)  # Every id gets its row, as the tables of plain torch have theirs.
        plain, ahead = itertools.cycle(made), iter(connection.prefetch(_Endless(made), lambda batch: batch.ids))

        def step_on(source: Iterator[Batch]) -> Callable[[], None]:
            def step() -> None:
                train(model, next(source), dense)
                check()

            return step

        yield Loop(dict(zip(operations, (step_on(plain), step_on(ahead)), strict=True)))


class _Endless:
    """A loader of the same batches again and again."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self._batches)
