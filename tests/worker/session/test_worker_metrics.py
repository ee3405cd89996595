"""Each metric of a worker moves when its cause happens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import ConfigError, NonFiniteGradient
from ps_protocol.metrics.definition import HistogramValue
from ps_worker.collectives import Collectives
from ps_worker.data.files.batches import FileBatches, ShareStretches, dataset
from ps_worker.data.samples import Share
from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.session.config import WorkerConfig
from ps_worker.session.metrics import WORKER, read_worker, start_server
from ps_worker.session.reporting import Progress, WaitReason, WorkerCounters
from tests.worker.data.files.made import folder
from tests.worker.fakes import FakeSession


class Training:
    """A model with one parameter on two fake shards."""

    def __init__(self, session: FakeSession, **policies: str) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer: PsOptimizer = declare_optimizer(
            session, torch.optim.SGD, self.model, {"lr": 0.1}, name="model", **policies
        )[0]

    def step(self, value: float = 1.0) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        self.optimizer.step()


def moved(session: FakeSession) -> dict[tuple[str, ...], float]:
    """What a scrape of the process shows, by name without prefix and by labels; of a histogram the number of values."""
    progress = Progress(Member(Role.WORKER, 0, 1))
    progress.counters = session.counters
    found = {}
    for sample in read_worker(progress):
        value = sample.value
        number = float(sum(value.counts)) if isinstance(value, HistogramValue) else float(value)
        found[sample.metric.name.removeprefix("torch_ps_"), *sample.labels] = number
    return found


def test_a_step_has_a_duration_and_computing_is_counted_between_two(session: FakeSession) -> None:
    training, counters = Training(session), session.counters
    training.step()
    first = moved(session)
    assert (first["step_seconds",], first["compute_seconds_total",]) == (1, 0)
    assert first["wait_seconds_total", "pull"] > 0
    training.step()
    second = moved(session)
    assert second["step_seconds",] == 2
    assert second["compute_seconds_total",] > 0
    assert counters.waits[WaitReason.RECONNECT] == counters.reconnects == counters.nonfinite == 0


def test_a_stream_that_breaks_is_a_reconnect_and_its_time_no_pull(session: FakeSession) -> None:
    training, counters = Training(session), session.counters
    session.shards[1].faults.lose_push = 1
    training.step()
    assert moved(session)["reconnects_total",] == counters.reconnects == 1
    assert moved(session)["wait_seconds_total", "reconnect"] >= 0.1, "the first pause of a backoff"


@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_a_gradient_that_is_not_finite_is_counted_refused_or_skipped(session: FakeSession, policy: str) -> None:
    training = Training(session, nonfinite=policy)
    if policy == "refuse":
        with pytest.raises(NonFiniteGradient):
            training.step(float("nan"))
    else:
        training.step(float("nan"))
    training.step()
    assert moved(session)["nonfinite_steps_total",] == 1
    assert moved(session)["step_seconds",] == 2


def test_waiting_for_rows_of_files_and_row_groups_left_out_are_counted(session: FakeSession, tmp_path: Path) -> None:
    folder(tmp_path, [100, 100])
    (tmp_path / "001.parquet").write_bytes(b"")
    progress = Progress(Member(Role.WORKER, 0, 1))
    data = dataset(tmp_path, ["id"], 16, seed=0, on_bad_file="skip")
    batches = FileBatches(data, ShareStretches(data.layout, Share(0, 1, 0), itertools.count()), progress)
    assert sum(len(batch["id"]) for batch in batches) == 100
    session.counters = progress.counters
    assert moved(session)["skipped_row_groups_total",] == 1
    assert moved(session)["data_wait_seconds_total",] > 0


def test_a_collective_call_has_a_duration_and_the_bytes_of_all_payloads(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bytes] = []

    def exchange(key: ExchangeKey, payload: bytes, wait_seconds: float) -> ExchangeState:
        given.append(payload)
        # The other worker comes with the second request.
        return ExchangeState(True, {0: payload, 1: payload}) if len(given) == 2 else ExchangeState(False, missing=(1,))

    monkeypatch.setattr(session, "config", WorkerConfig("host:1"), raising=False)
    monkeypatch.setattr(session, "exchange", exchange, raising=False)
    before = moved(session)
    assert (before["exchange_seconds",], before["exchange_bytes_total",]) == (0, 0)
    assert Collectives(session, []).all_reduce(torch.ones(3), "sum").tolist() == [2, 2, 2]
    after = moved(session)
    assert (after["exchange_seconds",], after["exchange_bytes_total",]) == (1, 3 * len(given[0]))


def test_the_time_for_other_workers_is_what_the_shard_says_and_never_more_than_there_is() -> None:
    counters = WorkerCounters()
    counters.answered(3.0, 2.0, 0.0, WaitReason.ROUND)
    counters.answered(1.0, 9.0, 0.25, WaitReason.BOUND)
    assert counters.waits == {
        WaitReason.PULL: 1.0,
        WaitReason.ROUND: 2.0,
        WaitReason.BOUND: 0.75,
        WaitReason.RECONNECT: 0.0,
    }


def test_what_is_read_are_the_counters_and_the_same_numbers_as_in_heartbeats() -> None:
    progress = Progress(Member(Role.WORKER, 3, 7))
    progress.record_step(1000, 2)
    progress.record_samples(32)
    progress.position = (1, 5)
    progress.counters.waits[WaitReason.ROUND] = 1.5
    found = {
        (sample.metric.name.removeprefix("torch_ps_"), *sample.labels): sample.value
        for sample in read_worker(progress)
        if not isinstance(sample.value, HistogramValue)
    }
    assert (found["steps_total",], found["samples_total",], found["transferred_bytes_total",]) == (1, 32, 1000)
    assert (found["wait_seconds_total", "round"], found["clock",]) == (1.5, 5)
    stats = progress.stats()
    assert (stats.steps, stats.samples, stats.wait_seconds["round"]) == (1, 32, 1.5)
    missing = {metric.name for metric in WORKER.metrics} - {sample.metric.name for sample in read_worker(progress)}
    assert missing == {"torch_ps_auth_failures_total", "torch_ps_certificate_expiry_timestamp_seconds"}


def test_the_port_is_off_unless_the_environment_names_one() -> None:
    def port(**environ: str) -> int | None:
        return WorkerConfig.from_environment({"PS_COORDINATOR": "host:1"} | environ).metrics_port

    assert port() is None
    assert port(PS_METRICS_PORT="off") is None
    assert (port(PS_METRICS_PORT="0"), port(PS_METRICS_PORT="9400")) == (0, 9400)
    for wrong in ("-1", "x", "65536", "+9400", "9_400"):
        with pytest.raises(ConfigError, match="PS_METRICS_PORT"):
            port(PS_METRICS_PORT=wrong)


def test_beyond_loopback_a_worker_needs_tls_and_tokens() -> None:
    config = WorkerConfig("host:1", metrics_bind="0.0.0.0", metrics_port=0)
    member = Member(Role.WORKER, 0, 1)
    with pytest.raises(ConfigError, match="without TLS and tokens"):
        start_server(config, member, Progress(member))
