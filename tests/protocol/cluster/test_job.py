"""What can name a job, and that its coordinator tells the name."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.job import DEFAULT_JOB, job_name
from ps_protocol.cluster.view import JoinRequest, Member, Role
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.cluster import JOINED
from ps_server.cli.launcher.main import main as ps_run
from ps_server.cli.psctl.main import main as psctl
from ps_server.coordinator.main import main as coordinator
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import running_coordinator

WRONG = ["", "a b", "-a", ".", "a/b", "a" * 101, "nächtlich", 'a"b', "a\n"]


@pytest.mark.parametrize("name", ["a", "7", "Night-run_3.b", "a" * 100])
def test_names(name: str) -> None:
    assert job_name("--job", name) == name


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_name_a_job_is_refused_wherever_it_comes_from(name: str) -> None:
    with pytest.raises(ConfigError, match="--job is no name of a job"):
        job_name("--job", name)
    if name:
        with pytest.raises(ConfigError, match="PS_JOB is no name of a job"):
            SecuritySettings.from_environment({"PS_JOB": name})
        with pytest.raises(InvalidRequest, match="that the coordinator tells is no name of a job"):
            JOINED.from_pb(pb.JoinReply(job=name), member=Member(Role.WORKER, 0, 1))


@pytest.mark.parametrize(
    ("command", "arguments"), [(coordinator, []), (ps_run, ["x.py"]), (psctl, ["certs", "init", "x", "--job", "a b"])]
)
def test_a_wrong_name_is_wrong_usage_of_every_program(command: click.Command, arguments: list[str]) -> None:
    done = CliRunner().invoke(command, arguments or [], env={"PS_JOB": "a b"})
    assert done.exit_code == 2
    assert "--job or PS_JOB is no name of a job" in done.output


def test_a_coordinator_of_an_earlier_version_tells_no_name() -> None:
    assert JOINED.from_pb(pb.JoinReply(), member=Member(Role.WORKER, 0, 1)).job == ""


@pytest.mark.parametrize(("name", "begins"), [("night", "job night · async · "), (DEFAULT_JOB, "async · ")])
def test_members_and_people_learn_the_name_from_the_coordinator(name: str, begins: str) -> None:
    settings = ClusterSettings(lease_seconds=600, job=name)
    with running_coordinator(settings) as started, CoordinatorClient(started.address) as client:
        assert client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "s").job == name
        assert client.get_status().job == name
        at = ["--coordinator", started.address]
        assert CliRunner().invoke(psctl, [*at, "status"], env={"COLUMNS": "120"}).output.startswith(begins)
        assert json.loads(CliRunner().invoke(psctl, [*at, "status", "-o", "json"]).output)["job"] == name
        top = CliRunner().invoke(psctl, [*at, "top", "--count", "1"], env={"COLUMNS": "120"}).output
        assert top.splitlines()[1].startswith(begins)
