"""What ps-run says at the end of a job."""

from pathlib import Path

from ps_protocol.cluster.view import ClusterStatus, ClusterView, Member, MemberStats, MemberStatus, Role
from ps_server.cli.launcher.output.summary import Folders, silent_workers, summary


def worker(rank: int, incarnation: int = 1, **stats: int) -> MemberStatus:
    return MemberStatus(Member(Role.WORKER, rank, incarnation), 0.1, MemberStats(**stats), gone="left")


def status(*members: MemberStatus) -> ClusterStatus:
    return ClusterStatus(ClusterView(), members)


def test_a_job_that_ended_well_says_steps_samples_and_time():
    done = status(worker(0, steps=500, samples=8000), worker(1, steps=485, samples=7760))
    assert summary(0, 31.4, done, [], Folders()) == ["finished in 0:31: 985 steps by 2 workers, 15760 samples"]


def test_what_is_not_known_or_not_counted_is_left_out():
    assert summary(0, 5, None, [], Folders()) == ["finished in 0:05"]
    assert summary(0, 5, status(worker(0, steps=3)), [], Folders()) == ["finished in 0:05: 3 steps by 1 worker"]


def test_failures_are_counted_and_what_is_left_of_the_job_has_its_place():
    failures = [
        "worker 1 exited with code 7",
        "shard 0 was killed by signal 9 (SIGKILL)",
        "worker 1 exited with code 7",
    ]
    folders = Folders(Path("/saved/checkpoint-00000003"), state=Path("state"), logs=Path("logs"))
    assert summary(7, 61, None, failures, folders) == [
        "ended with exit code 7 after 1:01",
        "failures: worker 1 exited with code 7 (2 times); shard 0 was killed by signal 9 (SIGKILL)",
        "checkpoint: /saved/checkpoint-00000003",
        "state: state; the same command continues from it",
        "logs: logs",
    ]


def test_a_checkpoint_that_is_not_the_last_is_called_older():
    saved = Path("/saved/checkpoint-00000003")
    (said,) = summary(74, 61, None, [], Folders(saved, unsaved=True))[1:]
    assert said == f"the last checkpoint was not written; the newest one is older: {saved}"
    (said,) = summary(74, 61, None, [], Folders(unsaved=True))[1:]
    assert said == "the last checkpoint was not written; there is none"


def test_workers_that_never_connected_are_named():
    (said,) = silent_workers(status(worker(1)), 3)
    assert said == "worker 0, worker 2 ended without having connected: does the script call ps_worker.connect()?"
    assert silent_workers(status(worker(0), worker(1)), 2) == []


def test_nothing_is_said_of_workers_where_it_cannot_be_known():
    assert silent_workers(None, 2) == []
    assert silent_workers(status(*(worker(rank) for rank in range(32))), 64) == []
