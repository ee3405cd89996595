"""Lost actors are started again within limits, and the ends of a job are in order. Ray is a fake; 0.5 s."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.client.worker_requests import LostServer, Wanted
from ps_protocol.cluster.scaling import ScaleOrder, WorkerRange
from ps_protocol.cluster.view import Role
from ps_protocol.errors import Fenced, NotReady, PsError, StateLost, Unavailable
from ps_worker.ray.plan import RayPlan
from tests.ray.fake_ray import FakeRay, GetTimeoutError, RayActorError, RayTaskError, forget, modules
from tests.support.shards import wait_until


class _Reservation:
    def options(self, bundle: int) -> dict[str, Any]:
        return {}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake, real = FakeRay(), forget()
    for name, module in modules(fake).items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    forget()
    sys.modules.update(real)


@pytest.fixture
def servers(ray: FakeRay) -> Iterator[Any]:
    made: list[Any] = []

    def make(requests: Any = None, **settings: Any) -> Any:
        plan = RayPlan(**{"shards": 2, "workers": 2, "data_dir": Path("/kept"), **settings})
        of_ray = importlib.import_module("ps_worker.ray.servers")
        made.append(of_ray.RayServers(plan, _Reservation(), "127.0.0.1", lambda plan, address: requests))
        return made[-1]

    yield make
    for each in made:
        each.close()


class _Requests:
    """What the coordinator requests, once."""

    def __init__(self, *wanted: Any) -> None:
        self.wanted = list(wanted)
        self.closed = False

    def take(self) -> Any:
        return self.wanted.pop(0) if self.wanted else Wanted()

    def close(self) -> None:
        self.closed = True


def names(ray: FakeRay) -> list[str]:
    return [str(actor.arguments[0]) for actor in ray.actors]


def test_lost_servers_are_started_again_until_no_restart_is_left(ray: FakeRay, servers: Any) -> None:
    started = servers(server_restarts=2)
    started.start(60.0)
    assert names(ray) == ["the coordinator", "shard 0", "shard 1"]
    ray.actors[1].call("serve").end(RayActorError())
    wait_until(lambda: ray.log.count("serve shard 0") == 2)
    ray.actors[0].call("serve").end("the coordinator was killed by signal 9; its log is empty")
    wait_until(lambda: ray.log.count("serve the coordinator") == 2)
    assert names(ray)[3:] == ["shard 0", "the coordinator"]
    assert ray.actors[4].call("serve").arguments == ("127.0.0.1:7000",)
    assert [actor.killed for actor in ray.actors] == [True, True, False, False, False]
    assert started.failure is None
    ray.actors[2].call("serve").end(RayTaskError(OSError("no memory")))
    wait_until(lambda: started.failure is not None)
    assert isinstance(started.failure, Unavailable)
    assert started.failure.message == "shard 1 cannot be started: no memory; all 2 restarts of servers are used"


def test_a_lost_server_without_a_folder_is_the_end(ray: FakeRay, servers: Any) -> None:
    started = servers(data_dir=None)
    started.start(60.0)
    ray.actors[2].call("serve").end(RayActorError())
    wait_until(lambda: started.failure is not None)
    assert isinstance(started.failure, StateLost)
    assert started.failure.message == "the actor of shard 1 was lost (RayActorError)"
    assert len(ray.actors) == 3


def test_a_server_that_the_coordinator_has_lost_is_killed_and_started_again(
    ray: FakeRay, servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ray.at_once["process"] = ("h0", 77)
    requests = _Requests()
    started = servers(requests, server_restarts=2, standbys=True)
    started.start(60.0)
    standby, others = ray.actors[3], [*ray.actors[:3], *ray.actors[4:]]
    assert str(standby.arguments[0]) == "the standby of shard 0"
    standby.call("process").end(("h1", 78))
    # It was a standby when it started, and a shard when it was lost; other processes have the same number elsewhere.
    lost = tuple(LostServer(Role.SHARD, 0, host, 78, "its lease ended") for host in ("h0", "h1", "h2"))
    requests.wanted += [Wanted(lost=lost), Wanted(lost=lost), Wanted(error=Unavailable("gone"))]
    wait_until(lambda: standby.killed)
    wait_until(lambda: not requests.wanted)
    assert not any(actor.killed for actor in others)
    standby.call("serve").end(RayActorError())
    wait_until(lambda: ray.log.count("serve the standby of shard 0") == 2)
    assert started.failure is None
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "RayCluster: the standby of shard 0 hangs: the coordinator has lost it, for its lease ended; it is killed",
        "RayCluster: processes that hang are not noticed: gone",
        "RayCluster: the standby of shard 0 hung and was killed; starting it again in 0 s (restart 1 of 2)",
    ]
    started.close()
    assert requests.closed


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (RayActorError(), "the actor of the coordinator was lost at its start"),
        (GetTimeoutError(), "Ray did not start the actor of the coordinator in time"),
        (RayTaskError(Unavailable("the coordinator exited with code 2")), "the coordinator exited with code 2"),
    ],
)
def test_a_server_that_does_not_start_is_an_error(ray: FakeRay, servers: Any, outcome: Exception, said: str) -> None:
    ray.at_once["address"] = outcome
    with pytest.raises(Unavailable, match=said):
        servers().start(60.0)


def test_the_coordinator_is_stopped_last_and_closing_twice_is_as_closing_once(ray: FakeRay, servers: Any) -> None:
    started = servers()
    started.start(60.0)
    started.close()
    started.close()
    assert ray.log[-3:] == ["stop shard 0", "stop shard 1", "stop the coordinator"]
    assert all(actor.killed for actor in ray.actors)


def test_a_coordinator_that_saves_is_stopped_before_the_shards_it_needs_and_says_what_was_not_saved(
    ray: FakeRay, servers: Any
) -> None:
    started = servers(coordinator_options=("--checkpoint-dir", "/saved"))
    started.start(60.0)
    ray.actors[1].stop.remote(1.0).end("the words of a shard are no reason")
    del ray.log[:]
    started.close()
    assert ray.log == ["stop the coordinator", "stop shard 0", "stop shard 1"]
    started = servers(coordinator_options=("--checkpoint-dir=/saved",))
    started.start(60.0)
    ray.at_once["stop"] = "its log ends with: Error: the last checkpoint was not written: no room"
    with pytest.raises(Unavailable, match=r"the last checkpoint was not written; actual: its log .*no room"):
        started.close()
    assert all(actor.killed for actor in ray.actors)


def workers(plan: RayPlan) -> Any:
    of_ray = importlib.import_module("ps_worker.ray.workers")
    return of_ray.RayWorkers(plan, _Reservation(), lambda rank: {"PS_RANK": str(rank)}, len, ("arguments",))


def test_results_are_by_rank_also_of_workers_that_were_lost(ray: FakeRay) -> None:
    running = workers(RayPlan(shards=1, workers=2, worker_restarts=1))

    def check() -> None:
        if len(ray.actors) == 2:
            ray.actors[1].call("run").end("of rank 1")
            ray.actors[0].call("run").end(RayActorError())
        elif len(ray.actors) == 3:
            assert running.actor(0) is ray.actors[2]
            ray.actors[2].call("run").end("of rank 0")

    assert running.run(check) == ["of rank 0", "of rank 1"]
    assert ray.actors[2].call("run").arguments == (len, ("arguments",), {"PS_RANK": "0"})
    running.close()
    assert all(actor.killed for actor in ray.actors)


def test_a_worker_that_hangs_is_killed_and_started_again_within_the_restarts(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = workers(RayPlan(shards=1, workers=2, worker_restarts=1))
    monkeypatch.setattr("ps_protocol.times.JOINING_SECONDS", 0.0)
    asked = iter([(), (1, 0), (0, 1, 7)])

    def check() -> None:
        if len(ray.actors) == 3:
            ray.actors[2].call("run").end("of rank 1")
            ray.actors[0].call("run").end("of rank 0")
        elif len(ray.actors) == 2 and ray.actors[1].killed:
            ray.actors[1].call("run").end(RayActorError())

    assert running.run(check, lambda soon: Wanted(next(asked, ()))) == ["of rank 0", "of rank 1"]
    assert not ray.actors[0].killed
    assert "the actor of worker 1 lives and is lost to the coordinator; it is killed" in caplog.text
    assert caplog.text.count("it is killed") == 1
    assert caplog.text.count("worker 0 is lost to the coordinator; all 1 restarts are used") == 2


def test_a_worker_that_may_still_be_about_to_join_is_not_killed(ray: FakeRay) -> None:
    running = workers(RayPlan(shards=1, workers=2, worker_restarts=1))
    looks = iter(range(3))

    def check() -> None:
        if next(looks, None) is None:
            for actor in ray.actors:
                actor.call("run").end("done")

    assert running.run(check, lambda soon: Wanted((0, 1))) == ["done", "done"]
    assert not any(actor.killed for actor in ray.actors)


@pytest.mark.parametrize("error", [Unavailable("shard 0 is away"), NotReady("2 of 3"), Fenced("its lease ended")])
def test_a_worker_that_ends_because_servers_were_away_is_started_again_within_the_restarts(
    ray: FakeRay, caplog: pytest.LogCaptureFixture, error: PsError
) -> None:
    running = workers(RayPlan(shards=1, workers=2, worker_restarts=1))

    def check() -> None:
        if len(ray.actors) == 2:
            ray.actors[1].call("run").end(RayTaskError(error))
        elif len(ray.actors) == 3:
            ray.actors[0].call("run").end("of rank 0")
            ray.actors[2].call("run").end("of rank 1")

    assert running.run(check) == ["of rank 0", "of rank 1"]
    assert ray.actors[1].killed
    assert (
        f"worker 1 ended with {type(error).__name__}: {error}; starting it again in 0 s (restart 1 of 1)" in caplog.text
    )


def test_where_no_restart_is_left_the_run_ends_with_what_the_worker_raised(ray: FakeRay) -> None:
    error = Unavailable("shard 0 is away")

    def check() -> None:
        if ray.actors:
            ray.actors[-1].call("run").end(RayTaskError(error))

    with pytest.raises(Unavailable, match="shard 0 is away") as raised:
        workers(RayPlan(shards=1, workers=1, worker_restarts=2)).run(check)
    assert len(ray.actors) == 3
    assert raised.value.__notes__[-2:] == ["worker 0 raised it", "all 2 restarts of workers are used"]


@pytest.mark.parametrize(
    ("outcome", "raised", "said"),
    [
        (RayActorError("out of memory"), Unavailable, "worker 1 was lost, and all 0 restarts of workers are used"),
        (RayTaskError(ZeroDivisionError("of the user")), ZeroDivisionError, "of the user"),
        (RayTaskError(StateLost("push 3 is lost")), StateLost, "push 3 is lost"),
    ],
)
def test_a_worker_that_fails_ends_the_run(ray: FakeRay, outcome: Exception, raised: type[Exception], said: str) -> None:
    running = workers(RayPlan(shards=1, workers=2, worker_restarts=0))
    with pytest.raises(raised, match=said):
        running.run(lambda: ray.actors[1].call("run").end(outcome) if len(ray.actors) == 2 else None)


def test_a_job_that_cannot_go_on_ends_the_run(ray: FakeRay) -> None:
    def check() -> None:
        raise StateLost("shard 0 was lost")

    with pytest.raises(StateLost, match="shard 0 was lost"):
        workers(RayPlan(shards=1, workers=2)).run(check)


def orders(*told: ScaleOrder) -> Any:
    """What the coordinator tells, one after the other, and then the last again and again."""
    left = list(told)
    return lambda soon: Wanted(order=left.pop(0) if len(left) > 1 else left[0])


def order(number: int, *ranks: int, live: tuple[int, ...] = (), finished: bool = False) -> ScaleOrder:
    return ScaleOrder(number, frozenset(ranks), live_ranks=frozenset(live), finished=finished)


def test_workers_begin_and_end_as_the_coordinator_tells_and_those_that_end_have_no_result(
    ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    plan = RayPlan(shards=1, workers=1, worker_range=WorkerRange(1, 4), worker_restarts=0)
    told = orders(order(0, 0), order(1, 0, 1, 2), order(1, 0, 1, 2), order(2, 0, 1), order(2, 0, 1, live=(0, 1)))
    last = order(2, 0, 1, finished=True)

    def check() -> None:
        if len(ray.actors) == 3 and ray.actors[2].killed and not ray.actors[2].call("run").ended.is_set():
            ray.actors[2].call("run").end(RayActorError())
            ray.actors[0].call("run").end("of rank 0")
            ray.actors[1].call("run").end("of rank 1")

    def requested(soon: bool) -> Wanted:
        ended = [actor.call("run").ended.is_set() for actor in ray.actors]
        return Wanted(order=last) if len(ended) == 3 and all(ended) else told(soon)

    running = workers(plan)
    assert running.run(check, requested) == ["of rank 0", "of rank 1"]
    assert "worker 2 is ended: the job is to have fewer" in caplog.text
    assert ray.actors[2].call("run").arguments == (len, ("arguments",), {"PS_RANK": "2"})


def test_a_worker_whose_function_goes_on_after_training_is_not_ended_and_has_a_result(ray: FakeRay) -> None:
    plan = RayPlan(shards=1, workers=2, worker_range=WorkerRange(1, 4), worker_restarts=0)
    saving = ScaleOrder(1, frozenset({1}), live_ranks=frozenset({1}), done_ranks=frozenset({0}))
    asked: list[bool] = []

    def requested(soon: bool) -> Wanted:
        asked.append(soon)
        if len(asked) == 3:
            ray.actors[0].call("run").end("saved")
            ray.actors[1].call("run").end("trained")
        return Wanted(order=saving if len(asked) < 5 else order(1, finished=True))

    assert workers(plan).run(lambda: None, requested) == ["saved", "trained"]
    assert not any(actor.killed for actor in ray.actors)


def test_a_run_without_workers_lasts_until_those_that_are_asked_for_have_trained(ray: FakeRay) -> None:
    plan = RayPlan(shards=1, workers=0, worker_range=WorkerRange.of(0))

    def check() -> None:
        for actor in ray.actors:
            actor.call("run").end("trained")

    told = orders(order(0), order(0), order(1, 0), order(1, 0, live=(0,)), order(1))
    assert workers(plan).run(check, told) == ["trained"]
