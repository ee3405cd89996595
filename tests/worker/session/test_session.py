"""A worker joins, waits for what is missing, passes barriers with the others, and leaves without being waited for."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, Fenced, InvalidRequest, NotReady, PermissionDenied, Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.security.roles import AccessRole
from ps_server.certs import CertificateFolder
from ps_server.cli.options.mode import ModeOptions
from ps_worker.data.datasets import share_of
from ps_worker.session.config import WorkerConfig
from ps_worker.session.session import Session
from tests.support.shards import wait_until
from tests.worker.jobs import running_job, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_a_worker_of_a_complete_cluster_knows_its_place() -> None:
    with running_job(workers=2) as job:
        clusters = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        assert [c.rank for c in clusters] == [0, 1]
        assert {c.world_size for c in clusters} == {2}
        assert {c.seed for c in clusters} == {11}
        assert {(c.role, str(c.device)) for c in clusters} == {("worker", "cpu")}


def test_connecting_waits_for_what_is_missing_and_says_what(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(shards=2, workers=2, start_shards=1) as job, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(job.cluster)
        wait_until(lambda: "worker 0: waiting for shard 1 and 1 more worker" in caplog.messages)
        assert not joining.done()
        job.start_shard(1)
        job.cluster()
        assert joining.result(60).rank == 0


def test_connecting_gives_up_naming_what_is_missing_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_minute_later(session: Session, text: str) -> None:
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
        monkeypatch.setattr("ps_worker.session.session.time", clock)

    monkeypatch.setattr(Session, "wait_hint", a_minute_later)
    with running_job(shards=2, workers=3, start_shards=1) as job:
        with pytest.raises(Unavailable, match="shard 1 and 2 more workers missing"):
            Session.join(job.config())
        assert "waiting for the cluster" in job.gone(0)


def test_connecting_to_nothing_gives_up_naming_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unavailable, match=address):
            Session.join(WorkerConfig(address, connect_timeout_seconds=0.3))


def test_a_barrier_opens_when_every_worker_is_there_and_again() -> None:
    with running_job(workers=2) as job:
        first, second = together(job.cluster, job.cluster)
        order: list[str] = []

        def pass_two(name: str, cluster: Any) -> None:
            for phase in range(2):
                order.append(f"before {phase}")
                cluster.barrier()
                order.append(f"after {phase}")

        together(lambda: pass_two("a", first), lambda: pass_two("b", second))
        for phase in range(2):
            last_before = max(i for i, event in enumerate(order) if event == f"before {phase}")
            assert last_before < order.index(f"after {phase}")
        assert first._session.phase == second._session.phase == 2


def test_a_barrier_says_whom_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(workers=2) as job:
        first, second = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(first.barrier)
            wait_until(lambda: "worker 0: waiting at the barrier for worker 1" in caplog.messages)
            second.barrier()
            waiting.result(60)


def test_a_worker_that_fails_holds_nobody_at_a_barrier_and_says_why() -> None:
    with running_job(workers=2) as job:
        first, second = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(first.barrier)
            with pytest.raises(ZeroDivisionError), second:
                _ = 1 / 0
            waiting.result(60)
        assert job.gone(1) == "left: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit(3)], ids=["Ctrl-C", "exit code 3"])
def test_an_interruption_leaves_at_once_and_gets_through(end: Any) -> None:
    with running_job(lease_seconds=60.0) as job:
        cluster = job.cluster()
        with pytest.raises(type(end) if isinstance(end, BaseException) else end), cluster:
            raise end
        assert job.gone(0).startswith("left: ")
        assert not job.view.live(Role.WORKER)


def test_sigterm_leaves_and_ends_with_code_143() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with running_job(lease_seconds=60.0) as job:
            cluster = job.cluster()
            with pytest.raises(SystemExit) as caught, cluster:
                os.kill(os.getpid(), signal.SIGTERM)
            assert caught.value.code == 143
            assert "SIGTERM" in job.gone(0)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("clean", [False, True], ids=["end of block", "exit code 0"])
def test_a_clean_end_leaves_without_a_reason(clean: bool) -> None:
    with running_job() as job:
        cluster = job.cluster()
        try:
            with cluster:
                if clean:
                    raise SystemExit(0)
        except SystemExit:
            pass
        assert job.gone(0) == "left"
        cluster.close()


def test_an_unknown_device_is_named_before_anything_is_joined() -> None:
    with pytest.raises(ConfigError, match="abacus"):
        Session.join(WorkerConfig("127.0.0.1:1", device="abacus"))


def test_ctrl_c_gets_through_a_barrier(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(workers=2) as job:
        first, _ = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))

        def press() -> None:
            wait_until(lambda: any("at the barrier" in message for message in caplog.messages))
            signal.raise_signal(signal.SIGINT)

        pressed = threading.Thread(target=press)
        pressed.start()
        with pytest.raises(KeyboardInterrupt), first:
            first.barrier()
        pressed.join()
        assert job.gone(0) == "left: KeyboardInterrupt"


@pytest.mark.parametrize(("reason", "patience_seconds"), [("ValueError: no", 60.0), ("", 0.5)])
def test_leaving_a_coordinator_that_is_gone_takes_seconds_or_as_long_as_was_told(
    reason, patience_seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_protocol.times.BRIEF_CALL_SECONDS", 2.0)
    with running_job(start_shards=1) as job:
        session = Session.join(replace(job.config(), reconnect_timeout_seconds=patience_seconds))
    begin = time.monotonic()
    session.leave(reason)
    session.close()
    assert time.monotonic() - begin < 30


def test_ctrl_c_ends_the_wait_for_a_coordinator_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(start_shards=1) as job:
        session = Session.join(replace(job.config(), reconnect_timeout_seconds=1e6))

    def press() -> None:
        wait_until(lambda: any("has finished, and waits up to" in message for message in caplog.messages))
        signal.raise_signal(signal.SIGINT)

    pressed = threading.Thread(target=press)
    pressed.start()
    with pytest.raises(KeyboardInterrupt):
        session.leave()
    session.close()
    pressed.join()


def test_a_process_whose_place_was_taken_over_is_fenced() -> None:
    with running_job() as job:
        old = job.cluster(rank=0)
        job.cluster(rank=0, take_over=True)
        wait_until(lambda: old._session._membership.fenced is not None)
        with pytest.raises(Fenced):
            old.barrier()


def test_a_forked_loader_process_neither_leaves_nor_ends_the_membership() -> None:
    with running_job(lease_seconds=60.0) as job:
        cluster = job.cluster()
        incarnation = cluster._session.incarnation
        loader = cluster.shard(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=2))
        child = os.fork()
        if child == 0:
            try:
                cluster.close()
                cluster.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert sorted(x for (batch,) in loader for x in batch.tolist()) == list(range(8))
        cluster._session.check()
        assert job.view.live(Role.WORKER)[0].incarnation == incarnation


def test_progress_reaches_the_coordinator_with_the_heartbeats() -> None:
    with running_job() as job:
        cluster = job.cluster()
        for _ in cluster.shard(DataLoader(TensorDataset(torch.arange(6)), batch_size=2)):
            cluster.report(loss=torch.tensor(0.25, requires_grad=True), epoch=3)
        wait_until(lambda: job.member(Role.WORKER, 0).stats.metrics == {"loss": 0.25, "epoch": 3.0})


@pytest.mark.parametrize("value", ["low", torch.zeros(2), None], ids=["text", "vector", "none"])
def test_what_is_no_number_is_not_reported(value: Any) -> None:
    with running_job() as job:
        cluster = job.cluster()
        with pytest.raises(ConfigError, match="loss"):
            cluster.report(loss=value)


def test_the_job_can_be_scaled() -> None:
    with running_job(workers=0) as job:
        cluster = job.cluster()
        assert cluster.scale(workers=2) == "worker 1 has to join"
        assert job.view.wanted_workers == 2
        with pytest.raises(NotReady, match=r"not scaled after 0.1 s: worker 1 has to join"):
            cluster.scale(workers=2, wait=True, timeout_seconds=0.1)
        assert cluster.scale(workers=1, wait=True) == "the job has 1 worker and 1 shard"
        with pytest.raises(InvalidRequest, match="nothing is to be scaled"):
            cluster.scale()
    with running_job(workers=1) as job, pytest.raises(InvalidRequest, match="is fixed"):
        job.cluster().scale(workers=2)


def test_where_the_job_has_roles_it_is_scaled_with_the_files_of_an_admin(tmp_path: Path) -> None:
    lab = CertificateFolder(tmp_path / "lab")
    lab.make(1, ())
    with running_job(workers=0, lab=lab) as job:
        cluster = job.cluster()
        with pytest.raises(PermissionDenied, match="admin"):
            cluster.scale(workers=2)
        assert cluster.scale(workers=2, security=lab.settings("admin", role=AccessRole.ADMIN)) == "worker 1 has to join"


def test_the_mode_of_the_job_can_be_changed() -> None:
    with running_job(workers=1) as job:
        cluster = job.cluster()
        cluster.set_mode("ssp", staleness=8)
        assert job.view.consistency == Consistency(Mode.SSP, staleness=8)
        cluster.set_mode("ssp", staleness=0)
        assert job.view.consistency == Consistency(Mode.SSP, staleness=0)
        with pytest.raises(ConfigError, match="mode"):
            cluster.set_mode("eventually")
        with pytest.raises(InvalidRequest):
            cluster.set_mode("sync", backup=1)


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
def test_the_bound_where_none_is_given_is_that_of_the_command_lines(mode: str) -> None:
    with running_job(workers=1) as job:
        job.cluster().set_mode(mode)
        assert job.view.consistency == ModeOptions().consistency(mode)


def test_an_elastic_job_counts_the_workers_that_live() -> None:
    with running_job(workers=0) as job:
        first, second = job.cluster(), job.cluster()
        wait_until(lambda: first.world_size == second.world_size == 2)
        first.close()
        wait_until(lambda: second.world_size == 1)
        share = share_of(second._session)
        assert (second.rank, share.rank, share.world_size) == (1, 0, 1)


def test_an_evaluator_is_told_what_to_call_instead() -> None:
    with running_job() as job:
        job.cluster()
        evaluator = job.cluster(Role.EVALUATOR)
        with pytest.raises(ConfigError, match="follow"):
            evaluator.optimizer(torch.optim.SGD, torch.nn.Linear(1, 1), lr=0.1)
        with pytest.raises(ConfigError, match="barrier"):
            evaluator.barrier()
        view = evaluator.shard(TensorDataset(torch.arange(5)))
        assert len(view) == 5


def test_a_worker_that_never_made_a_step_says_so_when_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(1, 1) as job:
        with job.cluster():
            pass
        assert "worker 0 leaves without a step: the script never called optimizer()" in caplog.text
        caplog.clear()
        with job.cluster() as cluster:
            model = torch.nn.Linear(2, 1)
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        assert "without a step: the script never called step() of its optimizer" in caplog.text
        caplog.clear()
        with job.cluster() as cluster:
            optimizer = cluster.optimizer(torch.optim.SGD, torch.nn.Linear(2, 1), lr=0.1)
            optimizer.step()
        with suppress(ZeroDivisionError), job.cluster():
            raise ZeroDivisionError
        assert "without a step" not in caplog.text
