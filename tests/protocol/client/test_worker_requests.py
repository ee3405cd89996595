"""What the coordinator asks the program for that starts workers: each request once, errors told. About 1 CPU s."""

from __future__ import annotations

import os
import queue
import socket
from typing import Any

import pytest

from ps_protocol.client import worker_requests
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.worker_requests import LostServer, WorkerRequests
from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.errors import PermissionDenied, Unavailable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_server.coordinator.elasticity.engines.find import find_engine
from ps_server.coordinator.elasticity.engines.kept_request import KeptRequest
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import running_coordinator
from tests.support.shards import wait_until


def taken(requests: WorkerRequests) -> tuple[int, ...]:
    """The next ranks."""
    found: list[tuple[int, ...]] = []
    wait_until(lambda: bool(found) or bool((ranks := requests.take().ranks) and not found.append(ranks)))
    return found[0]


def test_each_request_is_taken_once_also_of_a_coordinator_that_was_started_again() -> None:
    with running_coordinator() as coordinator:
        requests = WorkerRequests(coordinator.address, interval_seconds=0.02)
        try:
            assert (requests.take().ranks, requests.take().error) == ((), None)
            for ranks in ((2,), (2, 0), (2, 0)):
                coordinator.kept_request.request(4, ranks)
                assert taken(requests) == ranks
                assert (requests.take().ranks, requests.take().error) == ((), None)
            coordinator.stop()
            coordinator.kept_request = KeptRequest()
            coordinator.kept_request.request(4, (1,))
            coordinator.start()
            assert taken(requests) == (1,)
        finally:
            requests.close()


def test_shards_whose_leases_have_ended_are_told_and_whether_another_process_has_their_place() -> None:
    with running_coordinator(ClusterSettings(lease_seconds=0.3)) as coordinator:
        requests = WorkerRequests(coordinator.address, interval_seconds=0.02)
        with CoordinatorClient(coordinator.address) as client:
            client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1", directory="kept"), "first")
            found: list[LostServer] = []
            wait_until(lambda: bool(found) or found.extend(requests.take().lost) is not None)
            (lost,) = found
            assert (lost.role, lost.index, lost.host, lost.pid) == (Role.SHARD, 0, socket.gethostname(), os.getpid())
            assert (lost.how, lost.replaced) == ("its lease of 0.3 s ended", False)
        requests.close()


def test_the_engine_launcher_keeps_the_last_request() -> None:
    engine = find_engine("launcher", 8)
    assert isinstance(engine, KeptRequest)
    assert engine.last.number == 0
    engine.request(4, (2,))
    assert engine.request(4, (2, 3)) == "request 2, of the program that starts them"
    assert (engine.last.number, engine.last.workers, engine.last.ranks) == (2, 4, (2, 3))
    assert engine.describe() == "the program that starts them"


class FakeConnection:
    """Gives the answers that a test puts, one by one."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls = 0

    def once(self, method: str, request: Any, timeout_seconds: float) -> Any:
        self.calls += 1
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.answers.put(Unavailable("closed"))


def found_in(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> list[Any]:
    """What is taken after each of ``answers``, but for orders."""
    connection = FakeConnection()
    monkeypatch.setattr(worker_requests, "UNANSWERED", 3)
    monkeypatch.setattr(worker_requests, "CoordinatorConnection", lambda address, security: connection)
    requests = WorkerRequests("nowhere:1", interval_seconds=0.001)
    found: list[Any] = []
    for number, answer in enumerate(answers):
        connection.answers.put(answer)
        # The next call: the answer was handled.
        wait_until(lambda calls=number + 2: connection.calls == calls)
        wanted = requests.take()
        assert (wanted.order is None) is (isinstance(answer, Exception) or wanted.error is not None)
        found += [each for each in (wanted.lost, wanted.ranks) if each]
        found += [type(wanted.error).__name__] if wanted.error else []
    requests.close()
    return found


GONE, REFUSED = Unavailable("nobody is there"), PermissionDenied("not for you")


def asked(number: int, *ranks: int) -> pb.WorkerRequest:
    return pb.WorkerRequest(number=number, workers=4, ranks=ranks)


LOST = pb.WorkerRequest(lost=[pb.LostServer(role=1, index=1, pid=77, how="its lease ended")])
LOST_SERVER = LostServer(Role.SHARD, 1, "", 77, "its lease ended")
OF_A_LATER_VERSION = pb.WorkerRequest(lost=[pb.LostServer(role=77)])


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([GONE] * 9, ["Unavailable"]),
        ([GONE, GONE, asked(0)], []),
        ([asked(0), *[GONE] * 9, asked(1, 3)], [(3,)]),
        ([REFUSED, REFUSED, asked(1, 0), REFUSED], ["PermissionDenied", (0,), "PermissionDenied"]),
        ([asked(1, 2), asked(1, 2), asked(2, 2), asked(0), asked(1, 5)], [(2,), (2,), (5,)]),
        ([OF_A_LATER_VERSION, LOST, asked(0)], ["InvalidRequest", (LOST_SERVER,)]),
    ],
)
def test_errors_are_told_once_until_the_coordinator_answers(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], found: list[Any]
) -> None:
    assert found_in(monkeypatch, answers) == found
