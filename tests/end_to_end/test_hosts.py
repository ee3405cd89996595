"""Workers of one host push together: the numbers are those of workers that push by themselves, or as the page says."""

from __future__ import annotations

import errno
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient, TableFull
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker import Cluster
from ps_worker import rows as row_optimizers
from ps_worker.host.folder import HostFolder
from ps_worker.host.leader import Leader
from ps_worker.host.memory import LentParameters, LentRows
from ps_worker.host.messages import HostWorker
from ps_worker.session.session import Session
from ps_worker.step import host_exchange
from ps_worker.step.host_exchange import HostExchange
from tests.end_to_end.table_training import on_shards, read, steps_of, train
from tests.end_to_end.training import assert_bitwise, assert_close, batches, loss_of, net, values
from tests.support.length import few
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job

SYNC = Consistency(Mode.SYNC)
WORKERS = 4

Work = Callable[[Cluster], Any]


@pytest.fixture
def rounds(monkeypatch) -> list[tuple[int, ...]]:
    """Of each push that was made for several workers, their ranks; the leader's first."""
    made: list[tuple[int, ...]] = []
    combined = HostExchange._combined

    def noted(exchange: HostExchange, *arguments: Any) -> Any:
        push = combined(exchange, *arguments)
        if push is not None and push.combined is not None:
            made.append((exchange._session.rank, *(each.worker.rank for each in push.combined.taken)))
        return push

    monkeypatch.setattr(HostExchange, "_combined", noted)
    return made


def on_hosts(job: Job, work: Work, hosts: Sequence[int | None], transport: str = "auto") -> list[Any]:
    """``work`` in one thread per worker, on the host of its number; None: it pushes by itself. Results by rank."""

    def one(rank: int) -> Any:
        with job.cluster(rank=rank, host=hosts[rank], transport=transport) as cluster:
            return work(cluster)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return [future.result(100) for future in [pool.submit(one, rank) for rank in range(len(hosts))]]


def trained(
    hosts: Sequence[int | None],
    work: Work,
    *,
    consistency: Consistency = SYNC,
    shards: int = 2,
    transport: str = "auto",
    **settings: Any,
) -> list[Any]:
    with running_job(shards, len(hosts), consistency=consistency, **settings) as job:
        return on_hosts(job, work, hosts, transport)


def training(
    steps: int = 6, arguments: Mapping[str, Any] | None = None, make: Callable[[int], nn.Module] = net, **options: Any
) -> Work:
    """The usual loop with Adam; returns the final parameters."""
    data = batches(steps, WORKERS)

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = make(cluster.rank)
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.01, **(arguments or {}))
        for step in data:
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step(**options.get("step", dict)(cluster.rank) if "step" in options else {})
        optimizer.finish()
        return values(model)

    return work


def assert_same_bits(work: Work, rounds: list[Any], **settings: Any) -> None:
    """In sync, one host of four workers: every worker ends with the bytes that it ends with by itself."""
    by_themselves = trained([None] * WORKERS, work, **settings)
    assert not rounds
    together = trained([0] * WORKERS, work, **settings)
    assert rounds
    assert {tuple(sorted(made)) for made in rounds} == {(0, 1, 2, 3)}
    for found, wanted in zip(together, by_themselves, strict=True):
        assert_bitwise(found, wanted)


@pytest.mark.parametrize("transport", few(["shm", "bulk", "grpc"]))
def test_in_sync_the_workers_of_one_host_end_with_the_bytes_of_workers_that_push_by_themselves(rounds, transport):
    assert_same_bits(training(), rounds, transport=transport)
    assert len(rounds) == 6


def test_weights_of_workers_count_within_their_host_and_between_hosts(rounds):
    weighed = training(step=lambda rank: {"weight": 1.0 + rank})
    assert_same_bits(weighed, rounds)
    apart, together = (trained(hosts, weighed) for hosts in ([None] * WORKERS, [0, 1, 0, 0]))
    assert_close(together[0], apart[0])


def test_with_several_hosts_a_run_is_repeated_bit_for_bit_and_is_the_mean_over_all_workers(rounds):
    hosts = [0, 1, 1, 0]
    first, second = trained(hosts, training()), trained(hosts, training())
    assert {tuple(sorted(made)) for made in rounds} == {(0, 3), (1, 2)}
    assert len(rounds) == 24
    for found in (*first, *second):
        assert_bitwise(found, first[0])
    assert_close(first[0], trained([None] * WORKERS, training())[0])


def test_in_async_a_round_of_a_host_is_one_update(rounds):
    def work(cluster: Cluster) -> int:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in batches(8, WORKERS):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
            assert optimizer.last is not None
            assert optimizer.last.staleness == 0
        return optimizer.version

    versions = trained([0] * WORKERS, work, consistency=Consistency(Mode.ASYNC))
    assert versions == [len(rounds) + 4 * 8 - sum(map(len, rounds))] * WORKERS
    assert (0, 1, 2, 3) in {tuple(sorted(made)) for made in rounds}


def test_in_ssp_hosts_and_single_workers_train_together(rounds):
    trained([0, 0, None, 0], training(20), consistency=Consistency.of("ssp", staleness=1))
    assert rounds


def test_parameters_without_a_gradient_on_some_or_all_workers_are_as_they_are_without_a_host(rounds):
    class Some(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.net, self.frozen, self.odd = net(0), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
            # Its own: workers are threads here.
            generator = torch.Generator().manual_seed(5)
            for layer in (self.frozen, self.odd):
                nn.init.normal_(layer.weight, generator=generator)
            nn.init.zeros_(self.frozen.bias)
            self.frozen.requires_grad_(False)
            self._is_odd = rank % 2 == 1

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(self.frozen(self.odd(inputs) if self._is_odd else inputs))

    assert_same_bits(training(make=Some), rounds)


@pytest.mark.parametrize("buffers", ["rank0", "average"])
def test_buffers_are_combined_by_the_models_policy(rounds, buffers):
    def make(rank: int) -> nn.Module:
        model = net(0)
        model.insert(1, nn.BatchNorm1d(8))
        return model

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = make(cluster.rank)
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.01, buffers=buffers)
        for step in batches(5, WORKERS):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        cluster.barrier()
        return [*values(model), *(each.clone() for each in model.buffers())]

    assert_same_bits(work, rounds)


def test_in_sync_a_clipped_mean_is_that_of_all_workers(rounds):
    assert_same_bits(training(arguments={"clip_grad_norm": 0.05}), rounds)


def test_in_async_the_mean_of_a_host_is_clipped_as_one_gradient():
    apart = threading.Barrier(2)

    def work(cluster: Cluster) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = cluster.optimizer(torch.optim.SGD, [weight], lr=1.0, clip_grad_norm=1.0)
        apart.wait()
        weight.grad = torch.tensor([6.0, 0.0]) if cluster.rank else torch.tensor([0.0, 8.0])
        optimizer.step()
        return weight.detach().clone()

    for found in trained([0, 0], work, consistency=Consistency(Mode.ASYNC), shards=1):
        torch.testing.assert_close(found, torch.tensor([-0.6, -0.8]), atol=1e-5, rtol=0)


def test_overlap_works_in_a_host(rounds):
    assert_same_bits(training(arguments={"overlap": True}), rounds)
    trained([0] * WORKERS, training(20, {"overlap": True}), consistency=Consistency(Mode.ASYNC))


@pytest.mark.parametrize("wire", few(["topk:0.5", "int8", "bf16"], 2))
def test_a_wire_format_encodes_the_mean_and_all_workers_get_the_same_parameters(rounds, wire):
    train, ended = training(6, {"wire": wire}), threading.Barrier(WORKERS)

    def work(cluster: Cluster) -> list[torch.Tensor]:
        found = train(cluster)
        # Where the leader leaves while another copies the last parameters, that one asks for them, and gets exact ones.
        ended.wait(100)
        return found

    found = trained([0] * WORKERS, work, transport="bulk")
    assert len(rounds) == 6
    for each in found:
        assert_bitwise(each, found[0])
    assert_close(found[0], trained([None] * WORKERS, work, transport="bulk")[0], atol=0.1)


def test_a_wire_format_survives_steps_that_are_pushed_separately(rounds, monkeypatch):
    combined = HostExchange._combined

    def at_times(exchange: HostExchange, leader: Leader, taken: Any, push: Any, streams: Any) -> Any:
        if push.clock % 3 == 0:
            leader.dissolve("as where slices move")
            return None
        return combined(exchange, leader, taken, push, streams)

    monkeypatch.setattr(HostExchange, "_combined", at_times)
    found = trained([0] * WORKERS, training(12, {"wire": "int8"}), transport="bulk", shards=1)
    assert len(rounds) == 8
    for each in found:
        assert_close(each, found[0], atol=1e-2)


def test_workers_with_uneven_numbers_of_steps_train_to_their_ends_and_meet_at_the_barrier(rounds):
    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for _ in range(2):
            for step in batches(3 + cluster.rank, WORKERS):
                optimizer.zero_grad()
                loss_of(model, step[cluster.rank]).backward()
                optimizer.step()
            cluster.barrier()
        return values(model)

    found = trained([0] * WORKERS, work)
    for each in found:
        assert_bitwise(each, found[0])
    assert_close(found[0], trained([None] * WORKERS, work)[0])
    assert len({tuple(sorted(made)) for made in rounds}) >= 1


@pytest.mark.parametrize("overlap", [False, True])
def test_who_waits_in_a_collective_call_is_not_waited_for(rounds, overlap):
    def work(cluster: Cluster) -> int:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, overlap=overlap)
        for step in batches(2 + 2 * cluster.rank, 2):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        optimizer.finish()
        return len(cluster.gather_values(None))

    assert trained([0, 0], work) == [2, 2]
    assert rounds


def test_a_gradient_with_nan_is_an_error_on_its_worker_alone_and_the_others_go_on(rounds):
    def work(cluster: Cluster) -> int:
        model, refused = net(0), 0
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for number, step in enumerate(batches(6, WORKERS)):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            if (cluster.rank, number) == (2, 3):
                model[0].weight.grad.fill_(torch.nan)
                with pytest.raises(Exception, match="NaN or infinity"):
                    optimizer.step()
                refused += 1
                loss_of(model, step[cluster.rank]).backward()
                model[0].weight.grad.zero_()
            optimizer.step()
        return refused

    assert trained([0] * WORKERS, work) == [0, 0, 1, 0]
    assert len(rounds) == 6


def test_a_step_that_one_worker_skips_is_the_mean_of_the_others(rounds):
    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, nonfinite="skip")
        for number, step in enumerate(batches(6, WORKERS)):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            if number == 2 and cluster.rank in (0, 2):
                model[0].weight.grad.fill_(torch.nan)
            if number == 4:
                model[0].weight.grad.fill_(torch.inf)
            optimizer.step()
        return values(model)

    assert_same_bits(work, rounds)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_a_step_is_told_as_skipped_to_the_workers_that_skip_it_and_as_applied_to_the_others(rounds, mode):
    def work(cluster: Cluster) -> list[str]:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, nonfinite="skip")
        cluster.barrier()
        told = []
        for number, step in enumerate(batches(3, WORKERS)):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            if cluster.rank == number:
                model[0].weight.grad.fill_(torch.nan)
            optimizer.step()
            told.append(optimizer.last.outcome.name)
        cluster.barrier()  # a leader that ends at once has the others push by themselves, and be told DUPLICATE
        return told

    for rank, told in enumerate(trained([0, 0, 0], work, consistency=Consistency(mode))):
        assert told == ["SKIPPED" if number == rank else "APPLIED" for number in range(3)]
    assert rounds


def test_a_sum_that_overflows_is_not_pushed_for_the_host(rounds):
    def work(cluster: Cluster) -> bool:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = cluster.optimizer(torch.optim.SGD, [weight], lr=1e-38)
        weight.grad = torch.full((4,), 3e38)
        optimizer.step()
        return bool(torch.isfinite(weight).all())

    assert trained([0, 0], work, consistency=Consistency(Mode.ASYNC), shards=1) == [True, True]
    assert not rounds


def test_a_worker_without_shared_memory_says_so_once_and_pushes_by_itself(rounds, caplog, monkeypatch):
    create = SharedMemory.create

    def full(*arguments: Any, **options: Any) -> SharedMemory:
        if threading.current_thread().name.endswith("_1"):
            raise OSError(errno.ENOSPC, "no space left")
        return create(*arguments, **options)

    def work(cluster: Cluster) -> list[torch.Tensor]:
        threading.current_thread().name = f"worker_{cluster.rank}"
        return training()(cluster)

    monkeypatch.setattr(SharedMemory, "create", full)
    found = trained([0] * WORKERS, work, transport="bulk")
    assert {tuple(sorted(made)) for made in rounds} == {(0, 2, 3)}
    assert_close(found[1], trained([None] * WORKERS, training(), transport="bulk")[1])
    said = [each.getMessage() for each in caplog.records if "no shared memory for the gradients" in each.getMessage()]
    assert len(said) == 1


def test_a_leader_without_shared_memory_hands_over_to_another_worker(rounds, monkeypatch):
    create, lead, led = SharedMemory.create, HostFolder.lead, threading.Event()

    def full(*arguments: Any, **options: Any) -> SharedMemory:
        if threading.current_thread().name.endswith("_1"):
            raise OSError(errno.ENOSPC, "no space left")
        return create(*arguments, **options)

    def first_of_all(folder: HostFolder, worker: HostWorker, revision: int) -> bool:
        if worker.rank != 1 and not led.is_set():
            return False
        leads = lead(folder, worker, revision)
        if worker.rank == 1:
            led.set()
        return leads

    def work(cluster: Cluster) -> list[torch.Tensor]:
        threading.current_thread().name = f"worker_{cluster.rank}"
        return training()(cluster)

    monkeypatch.setattr(SharedMemory, "create", full)
    monkeypatch.setattr(HostFolder, "lead", first_of_all)
    found = trained([0] * WORKERS, work, transport="bulk")
    assert (0, 2, 3) in {tuple(sorted(made)) for made in rounds}
    assert all(1 not in made for made in rounds)
    assert_close(found[1], trained([None] * WORKERS, training(), transport="bulk")[1])


def test_where_nothing_can_be_lent_every_worker_pushes_by_itself_and_the_log_says_so(rounds, caplog, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(LentParameters, "__init__", full)
    found = trained([0] * WORKERS, training())
    assert not rounds
    assert_bitwise(found[0], trained([None] * WORKERS, training())[0])
    assert any("no shared memory for parameters" in each.getMessage() for each in caplog.records)


def test_a_worker_with_another_wire_format_is_told_and_pushes_by_itself(rounds, caplog):
    def work(cluster: Cluster) -> None:
        arguments = {"wire": "bf16"} if cluster.rank == 2 else {}
        training(arguments=arguments)(cluster)

    trained([0] * WORKERS, work, transport="bulk")
    assert all(2 not in made for made in rounds) or all(made[0] == 2 for made in rounds)
    assert any("do not push alike" in each.getMessage() for each in caplog.records)


def test_options_that_differ_in_a_host_are_told(rounds, caplog):
    def work(cluster: Cluster) -> None:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in batches(3, WORKERS):
            optimizer.param_groups[0]["lr"] = 0.2 if cluster.rank == 3 else 0.3
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING):
        trained([0] * WORKERS, work)
    assert rounds
    assert any("made with the options of" in each.getMessage() for each in caplog.records)


def test_values_that_all_workers_set_count_in_a_host(rounds):
    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for number, step in enumerate(batches(6, WORKERS)):
            if number == 3:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        return values(model)

    by_themselves, together = (trained([host] * WORKERS, work) for host in (None, 0))
    assert rounds
    for found in together:
        assert_close(found, by_themselves[0])


def test_models_are_stepped_in_turn_each_with_its_own_rounds(rounds):
    def work(cluster: Cluster) -> list[torch.Tensor]:
        models = [net(0), net(1)]
        made = [cluster.optimizer(torch.optim.Adam, model, lr=0.01) for model in models]
        for step in batches(6, WORKERS):
            for model, optimizer in zip(models, made, strict=True):
                optimizer.zero_grad()
                loss_of(model, step[cluster.rank]).backward()
                optimizer.step()
        return [*values(models[0]), *values(models[1])]

    assert_same_bits(work, rounds)
    assert len(rounds) == 12


def test_a_worker_leaves_and_another_leads_and_one_that_joins_is_taken(rounds):
    with running_job(1, 0, consistency=SYNC, least_workers=1) as job:
        trains = [threading.Event() for _ in range(3)]

        def one(rank: int, until: Callable[[], bool]) -> None:
            with job.cluster(rank=rank, host=0) as cluster:
                model = net(0)
                optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
                while not until():
                    optimizer.zero_grad()
                    loss_of(model, batches(1)[0][0]).backward()
                    optimizer.step()
                    trains[rank].set()

        def led_by_first() -> bool:
            return any(made[0] == 0 for made in rounds)

        def led_by_another() -> bool:
            return any(made[0] != 0 for made in rounds)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(one, 0, led_by_first)]
            for rank in (1, 2):
                assert trains[rank - 1].wait(60)
                futures.append(pool.submit(one, rank, led_by_another))
            for future in futures:
                future.result(100)


def test_the_mode_may_change_while_hosts_train(rounds):
    def work(cluster: Cluster) -> None:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for number in range(30):
            if cluster.rank == 0 and number in (8, 16, 24):
                cluster.set_mode({8: "async", 16: "ssp", 24: "sync"}[number])
            optimizer.zero_grad()
            loss_of(model, batches(1)[0][0]).backward()
            optimizer.step()
            if number > 16:
                cluster.gather_values(number)

    trained([0, 0, 0], work, shards=1)
    assert rounds


def test_nothing_is_left_of_a_host_when_its_workers_have_left(monkeypatch):
    # Short enough for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        trained([0, 0], training(), shards=1)
        (above,) = Path(folder).glob("torch-ps-hosts-*")
        wait_until(lambda: not list(above.iterdir()))
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "ps-host-leader"])


# -- tables


def table_training(
    steps: int = 6,
    row_optimizer: row_optimizers.RowOptimizer | None = None,
    arguments: Mapping[str, Any] | None = None,
    step: Callable[[int], Mapping[str, Any]] = lambda rank: {},
) -> Work:
    """The usual loop with two tables below a dense layer; returns all rows, and the dense parameters."""
    data = steps_of(3, steps, WORKERS)

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = on_shards(cluster, "sum", row_optimizer or row_optimizers.Adam(lr=0.05), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, **(arguments or {}))
        for batch in data:
            train(cluster, model, optimizer, [batch[cluster.rank]], **step(cluster.rank))
        return [*read(model.one, model.two), *values(model)]

    return work


@pytest.mark.parametrize("transport", few(["shm", "bulk", "grpc"]))
def test_in_sync_rows_of_one_host_end_with_the_bytes_of_workers_that_push_by_themselves(rounds, transport):
    assert_same_bits(table_training(), rounds, transport=transport)
    assert len(rounds) == 6


@pytest.mark.parametrize(
    "arguments",
    [{"wire": "int8"}, {"clip_grad_norm": 0.05}, {"nonfinite": "allow"}],
    ids=lambda found: next(iter(found)),
)
def test_rows_of_a_host_are_as_without_it_whatever_the_arguments(rounds, arguments):
    work = table_training(arguments=arguments, row_optimizer=row_optimizers.Adagrad(lr=0.5))
    if "wire" not in arguments:
        assert_same_bits(work, rounds)
        return
    apart, together = trained([None] * WORKERS, work), trained([0] * WORKERS, work)
    assert len(rounds) == 6
    for found, wanted in zip(together[0], apart[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.05)


def test_weights_of_workers_count_in_the_rows_of_their_host_and_between_hosts(rounds):
    weighed = table_training(step=lambda rank: {"weight": 1.0 + rank}, row_optimizer=row_optimizers.SGD(lr=0.5))
    assert_same_bits(weighed, rounds)
    apart, together = (trained(hosts, weighed) for hosts in ([None] * WORKERS, [0, 1, 0, 0]))
    assert_close(together[0], apart[0])


def test_rows_of_several_hosts_are_repeated_bit_for_bit_and_have_the_mean_over_all_workers(rounds):
    hosts, work = [0, 1, 1, 0], table_training(row_optimizer=row_optimizers.SGD(lr=0.5))
    first, second = trained(hosts, work), trained(hosts, work)
    assert {tuple(sorted(made)) for made in rounds} == {(0, 3), (1, 2)}
    assert len(rounds) == 24
    for found in (*first, *second):
        assert_bitwise(found, first[0])
    assert_close(first[0], trained([None] * WORKERS, work)[0])


@pytest.mark.parametrize("consistency", few([Consistency(Mode.SSP, staleness=1), Consistency(Mode.ASYNC)]), ids=str)
def test_an_update_of_a_host_changes_each_row_once_by_the_mean_of_its_workers(rounds, consistency):
    def work(cluster: Cluster) -> tuple[int, float]:
        table = cluster.embedding(
            2, name="rows", optimizer=row_optimizers.SGD(lr=1.0), init=row_optimizers.Constant(0.0)
        )
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table]), lr=1.0)
        for _ in range(8):
            optimizer.zero_grad()
            table(torch.tensor([5, 100 + cluster.rank])).sum().backward()
            optimizer.step()
        cluster.barrier()
        with torch.no_grad():
            return optimizer.version, float(table(torch.tensor([5]))[0, 0])

    found = trained([0] * WORKERS, work, consistency=consistency)
    made = len(rounds) + 4 * 8 - sum(map(len, rounds))
    assert rounds
    # Its gradient is 1 on every worker, and so is each mean of them.
    assert found == [(made, -made)] * WORKERS


def test_a_row_that_several_workers_use_travels_once(rounds, monkeypatch):
    sent = []
    combined = HostExchange._combined

    def noted(*arguments: Any) -> Any:
        push = combined(*arguments)
        sent.append([len(each.ids) for each in push.rows.tables])
        return push

    def work(cluster: Cluster) -> None:
        table = cluster.embedding(2, name="rows", optimizer=row_optimizers.SGD(lr=1.0))
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table]), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([*range(50), 1000 + cluster.rank])).sum().backward()
            optimizer.step()

    monkeypatch.setattr(HostExchange, "_combined", noted)
    trained([0] * WORKERS, work)
    assert sent == [[50 + WORKERS]] * 3


def test_a_worker_without_rows_and_one_that_skips_have_their_part_in_the_mean_as_without_a_host(rounds):
    def work(cluster: Cluster) -> list[torch.Tensor]:
        table = cluster.embedding(2, name="rows", optimizer=row_optimizers.Adam(lr=0.1))
        top = nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in top.parameters():
                parameter.fill_(0.3)
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table, top]), lr=0.1, nonfinite="skip")
        for number in range(6):
            optimizer.zero_grad()
            ids = torch.arange(4) + cluster.rank if (cluster.rank + number) % 3 else torch.arange(0)
            loss = top(table(ids)).sum() * (torch.nan if (cluster.rank, number) == (1, 4) else 1.0)
            if (cluster.rank, number) != (2, 2):  # no table takes part
                loss.backward()
            optimizer.step()
        with torch.no_grad():
            return [table(torch.arange(9)).clone(), *values(top)]

    assert_same_bits(work, rounds)
    assert len(rounds) == 6


def test_rows_with_nan_are_an_error_on_their_worker_alone_and_the_others_go_on(rounds):
    def work(cluster: Cluster) -> int:
        table, refused = cluster.embedding(2, name="rows", optimizer=row_optimizers.SGD(lr=1.0)), 0
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table]), lr=1.0)
        for number in range(5):
            optimizer.zero_grad()
            if (cluster.rank, number) == (2, 3):
                (table(torch.arange(5)) * torch.nan).sum().backward()
                with pytest.raises(NonFiniteGradient, match="rows"):
                    optimizer.step()
                refused += 1
                optimizer.zero_grad()
            table(torch.arange(5)).sum().backward()
            optimizer.step()
        return refused

    assert trained([0] * WORKERS, work) == [0, 0, 1, 0]
    assert len(rounds) == 5


def test_rows_whose_sum_overflows_or_that_are_too_many_for_one_push_are_pushed_by_each_worker(rounds, monkeypatch):
    def overflowing(cluster: Cluster) -> bool:
        table = cluster.embedding(2, name="rows", optimizer=row_optimizers.SGD(lr=1e-38))
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table]), lr=1.0)
        (table(torch.arange(3)) * 3e38).sum().backward()
        optimizer.step()
        with torch.no_grad():
            return bool(table(torch.arange(3)).isfinite().all())

    assert trained([0, 0], overflowing, consistency=Consistency(Mode.ASYNC)) == [True, True]
    assert not rounds
    monkeypatch.setattr(host_exchange, "MAX_ROWS_BYTES", 64)
    by_themselves, together = (trained([host] * WORKERS, table_training()) for host in (None, 0))
    assert not rounds
    assert_bitwise(together[0], by_themselves[0])


def test_rows_that_a_shard_has_no_room_for_are_an_error_on_their_worker_alone(rounds):
    def work(cluster: Cluster) -> int:
        table = cluster.embedding(2, name="full", max_rows=256, optimizer=row_optimizers.SGD(lr=1.0))
        optimizer, refused = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table]), lr=1.0), 0
        for number in range(4):
            optimizer.zero_grad()
            more = (cluster.rank, number) == (1, 2)
            table(torch.arange(1000 if more else 5)).sum().backward()
            if more:
                with pytest.raises(TableFull, match="full"):
                    optimizer.step()
                refused += 1
            else:
                optimizer.step()
        return refused

    assert trained([0, 0, 0], work, consistency=Consistency(Mode.ASYNC)) == [0, 1, 0]
    assert rounds


def test_a_worker_without_shared_memory_for_rows_says_so_once_and_pushes_by_itself(rounds, caplog, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(LentRows, "take", full)
    work = table_training(steps=3)
    found = trained([0, 0], work)
    assert not rounds
    assert_bitwise(found[0], trained([None, None], work)[0])
    said = [each.getMessage() for each in caplog.records if "no shared memory for the rows" in each.getMessage()]
    assert len(said) == 1


def test_who_waits_for_rows_on_a_shard_is_not_waited_for_by_a_worker_of_its_host_that_it_waits_for(rounds, monkeypatch):
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.2)
    # For so long workers of a host wait for each other; none loses its place.
    monkeypatch.setattr(Session, "lease_seconds", 1.0)
    leads, is_ahead, lockstep = (threading.Event() for _ in range(3))
    start = HostExchange.start

    def started(exchange: HostExchange, **how: Any) -> None:
        start(exchange, **how)
        leads.set()

    monkeypatch.setattr(HostExchange, "start", started)

    def step(table: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        table(torch.arange(5)).sum().backward()
        optimizer.step()

    def work(cluster: Cluster) -> int:
        table = cluster.embedding(2, name="rows", optimizer=row_optimizers.SGD(lr=1.0))
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([table]), lr=1.0)
        for number in range(8):
            if (number, cluster.rank) == (2, 1):
                assert is_ahead.wait(60)
                assert lockstep.wait(60)
            elif number == 6 and cluster.rank == 0:
                is_ahead.set()
                cluster.set_mode("sync")
                lockstep.set()
            step(table, optimizer)
        return optimizer.version

    with running_job(1, 2, consistency=Consistency(Mode.ASYNC)) as job:

        def one(rank: int) -> int:
            with job.cluster(rank=rank, host=0) as cluster:
                if rank == 1:
                    assert leads.wait(60)
                return work(cluster)

        with ThreadPoolExecutor(2) as pool:
            found = [future.result(60) for future in [pool.submit(one, rank) for rank in range(2)]]
    assert rounds
    assert found[0] == found[1]


# -- only in sync


def test_who_is_to_push_together_in_sync_does_so_in_that_mode_alone(rounds):
    made: list[int] = []
    modes = {6: "async", 12: "ssp", 18: "sync"}

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for number, step in enumerate(batches(24, 2)):
            if number in (6, 12, 18):
                cluster.gather_values(number)
                if cluster.rank == 0:
                    made.append(len(rounds))
                    cluster.set_mode(modes[number])
                cluster.gather_values(-number)
                # The view with a new mode comes a little later.
                wait_until(lambda mode=modes[number]: cluster._session.consistency.mode.value == mode)
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        cluster.barrier()
        return values(model)

    with running_job(1, 2, consistency=SYNC) as job:

        def one(rank: int) -> list[torch.Tensor]:
            with job.cluster(rank=rank, host=0, per_host="sync") as cluster:
                return work(cluster)

        with ThreadPoolExecutor(2) as pool:
            found = [future.result(100) for future in [pool.submit(one, rank) for rank in range(2)]]
    assert_bitwise(found[0], found[1])
    assert made[0] == made[2] == 6
    assert len(rounds) > made[2]


def test_a_model_that_is_made_in_another_mode_has_its_gradients_where_shards_take_them(rounds):
    def work(cluster: Cluster) -> bool:
        model = net(0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in batches(3, 2):
            optimizer.zero_grad()
            loss_of(model, step[cluster.rank]).backward()
            optimizer.step()
        return optimizer._model._gradients.on_host

    with running_job(1, 2, consistency=Consistency(Mode.ASYNC)) as job:

        def one(rank: int) -> bool:
            with job.cluster(rank=rank, host=0, per_host="sync") as cluster:
                return work(cluster)

        with ThreadPoolExecutor(2) as pool:
            assert [future.result(100) for future in [pool.submit(one, rank) for rank in range(2)]] == [False, False]
    assert not rounds
