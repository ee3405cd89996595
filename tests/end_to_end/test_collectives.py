"""Collectives of real workers in one process: values, uneven steps, deaths, a script that starts again. Costs 5 s."""

from collections.abc import Callable, Iterator

import pytest
import torch

from ps_protocol.cluster.exchange import MAX_PAYLOAD_BYTES, ExchangeKey
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster
from ps_worker.collectives import encode_value
from tests.worker.jobs import Job, running_job, together


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(workers=2, lease_seconds=60.0, consistency=Consistency(Mode.SYNC)) as job:
        yield job


def pair(job: Job) -> list[Cluster]:
    return together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))


def on_both(clusters: list[Cluster], call: Callable[[Cluster], object]) -> list[object]:
    first, second = clusters
    return together(lambda: call(first), lambda: call(second))


def test_every_worker_gets_the_same_values(job: Job) -> None:
    clusters = pair(job)

    def script(cluster: Cluster) -> object:
        own = torch.tensor([cluster.rank + 1.0, -cluster.rank], dtype=torch.float64)
        uneven = cluster.all_gather(torch.full((cluster.rank + 1,), cluster.rank))
        reduced = {how: cluster.all_reduce(own, how).tolist() for how in ("mean", "sum", "min", "max")}
        told = cluster.broadcast({"path": "a/b", "best": [0.5]} if cluster.rank else None, source=1)
        tensor = cluster.broadcast(own)
        return [each.tolist() for each in uneven], reduced, told, tensor.tolist()

    reduced = {"mean": [1.5, -0.5], "sum": [3.0, -1.0], "min": [1.0, -1.0], "max": [2.0, 0.0]}
    expected = ([[0], [1, 1]], reduced, {"path": "a/b", "best": [0.5]}, [1.0, 0.0])
    assert on_both(clusters, script) == [expected, expected]


def test_wrong_calls_are_typed_errors_with_a_remedy(job: Job) -> None:
    clusters = pair(job)
    cluster = clusters[0]
    with pytest.raises(ConfigError, match="unknown reduction"):
        cluster.all_reduce(torch.ones(1), "median")
    with pytest.raises(ConfigError, match=r"mean of integers.*tensor.float"):
        cluster.all_reduce(torch.ones(1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="needs a tensor"):
        cluster.all_gather(1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PAYLOAD_BYTES} bytes"):
        cluster.broadcast(torch.zeros(MAX_PAYLOAD_BYTES, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="evaluator made a collective call"):
        job.cluster(Role.EVALUATOR).all_gather(torch.ones(1))

    def differing(cluster: Cluster) -> object:
        with pytest.raises(InvalidRequest, match="tensors that differ between workers"):
            cluster.all_reduce(torch.ones(cluster.rank + 1), name="differing")
        with pytest.raises(InvalidRequest, match=r"different collective calls.*expected: \w+.*actual: \w+"):
            (cluster.all_gather if cluster.rank else cluster.all_reduce)(torch.ones(1), name="mixed")
        with pytest.raises(InvalidRequest, match="worker 5 did not take part"):
            cluster.broadcast(1, source=5, name="absent")
        return None

    on_both(clusters, differing)


def test_a_worker_with_more_steps_in_sync_is_not_kept_by_one_in_a_collective(job: Job) -> None:
    clusters = pair(job)

    def script(cluster: Cluster) -> object:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        start = model.weight.detach().clone()
        for _ in range(4 if cluster.rank else 2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        told = cluster.all_reduce(torch.tensor(float(cluster.rank)), "sum")
        # Two steps of both, then two of worker 1 alone: no gradient is lost, and none counts as zero.
        optimizer.pull()
        return told.item(), (start - model.weight.detach()).tolist()

    for total, moved in on_both(clusters, script):  # type: ignore[misc]
        assert total == 1.0
        assert moved[0] == pytest.approx([0.4, 0.4])


def test_a_script_that_starts_again_gets_recorded_results_and_catches_up(job: Job) -> None:
    clusters = pair(job)

    def script(cluster: Cluster) -> object:
        return [cluster.all_reduce(torch.tensor(float(cluster.rank)), "sum").item() for _ in range(5)]

    assert on_both(clusters, script) == [[1.0] * 5] * 2
    clusters[1]._session.leave("killed")
    alone = clusters[0].all_gather(torch.tensor(7.0))
    assert [each.item() for each in alone] == [7.0]
    clusters[1] = job.cluster(rank=1)
    assert script(clusters[1]) == [1.0] * 5
    assert [each.item() for each in clusters[1].all_gather(torch.tensor(8.0))] == [7.0]
    # It has caught up: now it comes to an exchange first, and the other one is told its value.
    payload = encode_value("all_reduce sum", torch.tensor(1.0))
    assert not clusters[1]._session.exchange(ExchangeKey("default", 6), payload, 0.0).complete
    assert on_both(clusters, script) == [[1.0] * 5] * 2


def test_a_worker_that_dies_while_others_wait_is_left_out(job: Job) -> None:
    first, second = pair(job)
    told, _ = together(lambda: first.all_gather(torch.tensor(3.0)), lambda: second._session.leave("killed"))
    assert told is not None
    assert [each.item() for each in told] == [3.0]
