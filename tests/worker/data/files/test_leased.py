"""Workers lease the rows of files: each is trained once an epoch, in any mode, also when workers leave, join or die."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster, files
from ps_worker.data.files.layout import LEAST_ROWS
from ps_worker.files import FileBatches
from tests.support.length import few
from tests.support.shards import wait_until
from tests.worker.data.files.made import folder, ids_of, parquet, text
from tests.worker.jobs import Job, running_job, together

MODES = {
    "async": Consistency(Mode.ASYNC),
    "ssp": Consistency(Mode.SSP, staleness=1),
    "sync": Consistency(Mode.SYNC),
}
#: Parts of the data that ``rows`` makes.
PARTS = 12


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(workers=0) as job:
        yield job


@pytest.fixture
def rows(tmp_path: Path) -> int:
    """Files in ``tmp_path``; their rows."""
    parquet(tmp_path / "a.parquet", range(10 * LEAST_ROWS), group=10 * LEAST_ROWS)
    parquet(tmp_path / "b.parquet", range(10 * LEAST_ROWS, 12 * LEAST_ROWS - 5), group=LEAST_ROWS)
    return 12 * LEAST_ROWS - 5


class Trainer:
    """One worker: a gradient of 1 per row and a learning rate of 1, so that the parameter counts the rows."""

    def __init__(self, cluster: Cluster, path: Path, **arguments: Any) -> None:
        self.cluster = cluster
        self.parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.optimizer = cluster.optimizer(torch.optim.SGD, [self.parameter], lr=1.0)
        self.batches = cluster.files(path, ["id"], **{"batch_size": 16, **arguments})
        self.seen: list[int] = []

    def step(self, batch: Any) -> None:
        self.seen += batch["id"].tolist()
        self.parameter.grad = torch.full_like(self.parameter, float(len(batch["id"])))
        self.optimizer.step()

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for batch in self.batches:
                self.step(batch)
        self.cluster.barrier()


def kill(cluster: Cluster) -> None:
    """To the cluster it is as if the process had died."""
    cluster._session._membership.close()


@pytest.mark.parametrize("mode", few(MODES, 2))
def test_workers_train_every_row_once_an_epoch_in_any_mode(tmp_path: Path, rows: int, mode: str) -> None:
    with running_job(shards=2, workers=3, consistency=MODES[mode]) as job:
        clusters = together(*(lambda r=r: job.cluster(rank=r) for r in range(3)))
        trainers = together(*(lambda c=c: Trainer(c, tmp_path) for c in clusters))
        together(*(lambda t=t: t.train(3) for t in trainers))
        assert Counter(itertools.chain(*(t.seen for t in trainers))) == Counter(dict.fromkeys(range(rows), 3))
        if mode == "async":
            assert trainers[0].parameter.eq(-3.0 * rows).all()


def test_a_worker_alone_has_the_order_of_one_process(tmp_path: Path, job: Job, rows: int) -> None:
    cluster = job.cluster()
    alone = files.read(tmp_path, ["id"], batch_size=16, seed=cluster.seed)
    leased = cluster.files(tmp_path, ["id"], batch_size=16)
    for _ in range(2):
        assert ids_of(leased) == ids_of(alone)


def test_without_leases_row_groups_are_split_by_rank(tmp_path: Path, rows: int) -> None:
    with running_job(workers=2) as job:
        clusters = together(*(lambda r=r: job.cluster(rank=r) for r in range(2)))
        parts = [ids_of(c.files(tmp_path, ["id"], batch_size=16, lease=False)) for c in clusters]
    assert sorted(parts[0] + parts[1]) == list(range(rows))
    assert min(map(len, parts)) >= (PARTS // 2 - 1) * LEAST_ROWS


def test_an_evaluator_gets_all_rows(tmp_path: Path, job: Job, rows: int) -> None:
    batches = job.cluster(Role.EVALUATOR).files(tmp_path, ["id"], batch_size=16)
    assert sorted(ids_of(batches)) == list(range(rows))


def test_len_is_an_equal_part_of_the_live_workers(tmp_path: Path, job: Job, rows: int) -> None:
    first = job.cluster()
    batches = first.files(tmp_path, ["id"], batch_size=16)
    assert len(batches) == -(-rows // 16)
    job.cluster()
    wait_until(lambda: first.world_size == 2)
    assert len(batches) == -(-rows // 32)
    assert batches.rows == rows


def left_after(trainer: Trainer, batches: int) -> None:
    for number, batch in enumerate(trainer.batches):
        if number == batches:
            break
        trainer.step(batch)


@pytest.mark.parametrize("batches", [1, 3, 4, 9])
def test_the_rest_of_a_loop_that_is_left_is_trained_by_others(tmp_path: Path, rows: int, batches: int) -> None:
    with running_job(workers=0) as job:
        first, second = together(*(lambda: Trainer(job.cluster(), tmp_path) for _ in range(2)))
        left_after(first, batches)
        assert len(first.seen) == 16 * batches
        for batch in second.batches:
            second.step(batch)
        assert sorted(first.seen + second.seen) == list(range(rows))


def test_a_loop_that_is_left_goes_on_in_the_middle_of_a_window(tmp_path: Path, job: Job, rows: int) -> None:
    trainer = Trainer(job.cluster(), tmp_path)
    for number in (3, 5, 2):
        left_after(trainer, number)
    for batch in trainer.batches:
        trainer.step(batch)
    # What earlier epochs have left comes before the rows of the fourth.
    assert Counter(trainer.seen) == Counter(dict.fromkeys(range(rows), 4))


def test_random_workers_that_come_and_leave_train_every_row_once(tmp_path: Path) -> None:
    count = folder(tmp_path, [130, 700, 20], group=50)
    draw = random.Random(7)
    with running_job(workers=0) as job:
        seen: list[int] = []
        cluster = job.cluster()
        trainer = Trainer(cluster, tmp_path, batch_size=24, shuffle=90)
        while len(seen) < count:
            left_after(trainer, draw.randrange(1, 9))
            seen += trainer.seen
            if len(seen) >= count:
                break
            job.cluster()
            cluster.close()
            cluster = job.cluster()
            trainer = Trainer(cluster, tmp_path, batch_size=24, shuffle=90)
        assert Counter(seen) == Counter(range(count))


def test_the_rows_of_a_worker_that_dies_are_trained_by_others(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 0.5)
    with running_job(workers=0) as job:
        dead, alive = together(*(lambda: Trainer(job.cluster(), tmp_path) for _ in range(2)))
        running = iter(dead.batches)
        for _ in range(6):
            dead.step(next(running))
        kill(dead.cluster)
        for batch in alive.batches:
            alive.step(batch)
        assert set(dead.seen) | set(alive.seen) == set(range(rows))
        assert len(alive.seen) == len(set(alive.seen))
        # What it had not reported: the part that it was in, at most two.
        assert len(set(dead.seen) & set(alive.seen)) <= 2 * LEAST_ROWS


def test_compressed_text_is_leased_by_the_file(tmp_path: Path, job: Job) -> None:
    for number in range(4):
        text(tmp_path / f"{number}.csv.gz", ["id", *map(str, range(number * 100, number * 100 + 100))])
    clusters = [job.cluster() for _ in range(2)]
    parts = together(*(lambda c=c: ids_of(c.files(tmp_path, ["id"], batch_size=16)) for c in clusters))
    assert sorted(itertools.chain(*parts)) == list(range(400))


def test_rows_that_cannot_be_read_hold_up_no_epoch(tmp_path: Path, job: Job) -> None:
    folder(tmp_path, [500] * 3, group=100)
    (tmp_path / "001.parquet").write_bytes(b"")
    clusters = [job.cluster() for _ in range(2)]

    def train(cluster: Cluster) -> list[int]:
        batches = cluster.files(tmp_path, ["id"], batch_size=16, on_bad_file="skip", drop_last=True)
        return [id for _ in range(2) for id in ids_of(batches)]

    times = Counter(itertools.chain(*together(*(lambda c=c: train(c) for c in clusters))))
    assert set(times) <= {*range(500), *range(1000, 1500)}
    assert sum(times.values()) >= 2 * (1000 - 2 * 3 * 16)


def begun(job: Job, path: Path, **arguments: Any) -> FileBatches:
    """Files whose first epoch a worker has begun."""
    batches = job.cluster().files(path, ["id"], batch_size=16, name="clicks", **arguments)
    next(iter(batches))
    return batches


@pytest.mark.parametrize("count", few([3, 3000]))
def test_a_file_that_differs_on_another_worker_is_refused_by_name(tmp_path: Path, job: Job, count: int) -> None:
    for number in range(count):
        (tmp_path / f"{number:04}.csv").write_text("id\n1\n2\n")
    begun(job, tmp_path)
    (tmp_path / "0001.csv").write_text("id\n1\n3\n")
    with pytest.raises(DamagedData, match=r"0001\.csv.*of 'clicks', is not the file that the job began with"):
        ids_of(job.cluster().files(tmp_path, ["id"], batch_size=16, name="clicks"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: parquet(path / "c.parquet", [1]), "expected: 2 files.*actual: 3 files"),
        (lambda path: parquet(path / "b.parquet", range(7)), r"b\.parquet.*is not the file"),
        (lambda path: (path / "b.parquet").rename(path / "c.parquet"), r"c\.parquet.*is not the file"),
    ],
    ids=["another file", "another content", "another name"],
)
def test_other_files_than_the_job_began_with_are_refused(
    tmp_path: Path, job: Job, rows: int, change: Any, says: str
) -> None:
    begun(job, tmp_path)
    change(tmp_path)
    with pytest.raises(DamagedData, match=says):
        ids_of(job.cluster().files(tmp_path, ["id"], batch_size=16, name="clicks"))


def test_another_order_of_rows_is_refused_but_another_batch_size_is_not(tmp_path: Path, job: Job, rows: int) -> None:
    begun(job, tmp_path)
    with pytest.raises(DamagedData, match="called in another way"):
        ids_of(job.cluster().files(tmp_path, ["id"], batch_size=16, name="clicks", shuffle=False))
    other = job.cluster().files(tmp_path, ["id"], batch_size=32, name="clicks")
    assert len(ids_of(other)) > 0


@pytest.mark.parametrize("change", [{"delimiter": ";"}, {"header": ["id"]}, {"quoted_lines": True}])
def test_text_that_is_read_in_another_way_is_refused(tmp_path: Path, job: Job, change: dict[str, Any]) -> None:
    text(tmp_path / "a.csv", ["id", *map(str, range(99))])
    begun(job, tmp_path)
    with pytest.raises(DamagedData, match=r"called in another way.*delimiter=, header= and quoted_lines="):
        ids_of(job.cluster().files(tmp_path, {"id": files.ids("id")}, batch_size=16, name="clicks", **change))


def test_other_data_under_the_name_of_files_is_refused(tmp_path: Path, job: Job, rows: int) -> None:
    begun(job, tmp_path)
    data = torch.utils.data.TensorDataset(torch.arange(9))
    with pytest.raises(InvalidRequest, match="another dataset under the name 'clicks'"):
        list(job.cluster().shard(torch.utils.data.DataLoader(data), name="clicks"))


def test_files_are_split_already_for_shard(tmp_path: Path, job: Job, rows: int) -> None:
    cluster = job.cluster()
    with pytest.raises(ConfigError, match="split among the workers already"):
        cluster.shard(cluster.files(tmp_path, batch_size=16))
    with pytest.raises(ConfigError, match="split among the workers already"):
        cluster.shard(files.read(tmp_path, batch_size=16), even=True)  # type: ignore[call-overload]


@pytest.mark.parametrize("lease", [None, False])
def test_files_that_were_read_for_one_process_are_shared_in_the_order_of_the_job(
    tmp_path: Path, rows: int, lease: bool | None
) -> None:
    with running_job(workers=2) as job:
        clusters = together(*(lambda r=r: job.cluster(rank=r) for r in range(2)))
        # Another seed on each worker, as of a script that takes its rank for one.
        mine = [files.read(tmp_path, ["id"], batch_size=16, seed=cluster.rank) for cluster in clusters]
        parts = [cluster.shard(each, lease=lease) for cluster, each in zip(clusters, mine, strict=True)]
        assert [part.leased for part in parts] == [lease is None] * 2
        for _ in range(2):
            found = together(*(lambda p=p: ids_of(p) for p in parts))
            assert sorted(itertools.chain(*found)) == list(range(rows))


@pytest.mark.parametrize("mode", few(MODES))
def test_rows_of_tables_are_requested_ahead_of_leased_rows(tmp_path: Path, rows: int, mode: str) -> None:
    with running_job(workers=0, consistency=MODES[mode]) as job:
        clusters = [job.cluster(rank=rank) for rank in range(2)]

        def train(cluster: Cluster) -> tuple[list[int], list[int]]:
            bag = cluster.embedding_bag(4, name="ids")
            optimizer = cluster.optimizer(torch.optim.SGD, bag, lr=0.1)
            batches = cluster.files(tmp_path, ["id"], batch_size=16)
            seen: list[int] = []
            ahead: list[int] = []

            def ids_of_batch(batch: Any) -> dict[Any, torch.Tensor]:
                ahead.append(len(seen))
                return {bag: batch["id"][:, None]}

            for _ in range(2):
                for batch in cluster.prefetch(batches, ids_of_batch):
                    bag(batch["id"][:, None]).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen += batch["id"].tolist()
            cluster.barrier()
            return seen, ahead

        results = together(*(lambda c=c: train(c) for c in clusters))
    assert Counter(itertools.chain(*(seen for seen, _ in results))) == Counter(dict.fromkeys(range(rows), 2))
    # Ahead: the ids of a second batch were asked for before the first one was trained.
    assert all((ahead[:2] == [0, 0]) == (mode != "sync") for _, ahead in results if len(ahead) > 1)


def test_a_prefetch_that_is_left_gives_back_what_was_not_trained(tmp_path: Path, rows: int) -> None:
    with running_job(workers=0) as job:
        first, second = together(*(lambda: Trainer(job.cluster(), tmp_path) for _ in range(2)))
        for number, batch in enumerate(first.cluster.prefetch(first.batches, lambda batch: {})):
            if number == 3:
                break
            first.step(batch)
        for batch in second.batches:
            second.step(batch)
        assert sorted(first.seen + second.seen) == list(range(rows))


def test_an_iteration_that_is_still_there_takes_no_rows_of_the_next_one(tmp_path: Path, job: Job, rows: int) -> None:
    trainer = Trainer(job.cluster(), tmp_path)
    first = iter(trainer.batches)
    trainer.step(next(first))
    for number, batch in enumerate(trainer.batches):
        trainer.step(batch)
        if number == 2:
            assert next(first, None) is None
            del first
    for batch in trainer.batches:
        trainer.step(batch)
    assert Counter(trainer.seen) == Counter(dict.fromkeys(range(rows), 3))
