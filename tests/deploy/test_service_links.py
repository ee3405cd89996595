"""The variables that Kubernetes sets for Services break the start of no program. Less than 1 s of CPU."""

from __future__ import annotations

import importlib
import os

import click
import pytest
from click.core import ParameterSource

from ps_protocol.errors import ConfigError
from ps_server.entry import MODULES
from ps_worker.session.config import WorkerConfig, runs_alone

#: Names of Services whose variables have the names of options.
SERVICES = (
    *("PS", "PS_RUN", "PS_SERVER", "PS_COORDINATOR", "PS_WORKER", "PS_METRICS", "PS_PAGE"),
    *("PS_COORDINATOR_METRICS", "PS_COORDINATOR_PAGE", "PS_SERVER_METRICS", "PS_RUN_METRICS", "PS_RUN_PAGE", "PSCTL"),
)


def links(scheme: str = "tcp") -> dict[str, str]:
    """What a kubelet sets in each pod, for one port of each Service."""
    made: dict[str, str] = {}
    for name in SERVICES:
        made |= {
            f"{name}_SERVICE_HOST": "10.0.0.1",
            f"{name}_SERVICE_PORT": "7000",
            f"{name}_SERVICE_PORT_GRPC": "7000",
            f"{name}_PORT": f"{scheme}://10.0.0.1:7000",
            f"{name}_PORT_7000_{scheme.upper()}": f"{scheme}://10.0.0.1:7000",
            f"{name}_PORT_7000_{scheme.upper()}_PROTO": scheme,
            f"{name}_PORT_7000_{scheme.upper()}_PORT": "7000",
            f"{name}_PORT_7000_{scheme.upper()}_ADDR": "10.0.0.1",
        }
    return made


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("PS_", "PSCTL"))]:
        monkeypatch.delenv(name)
    for name, value in links().items():
        monkeypatch.setenv(name, value)


def context_of(program: str, *arguments: str) -> click.Context:
    command: click.Command = importlib.import_module(MODULES[program]).main
    return command.make_context(program, list(arguments), **command.context_settings)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [("ps-coordinator", ()), ("ps-server", ("--shard", "0")), ("ps-run", ("train.py",)), ("psctl", ("status",))],
)
def test_no_program_takes_a_value_from_them(program, arguments):
    context = context_of(program, *arguments)
    sources = {parameter.name: context.get_parameter_source(parameter.name) for parameter in context.command.params}
    assert [name for name, source in sources.items() if source is ParameterSource.ENVIRONMENT] == []


def test_a_port_that_somebody_set_is_taken_beside_them(monkeypatch):
    monkeypatch.setenv("PS_COORDINATOR_PORT", "7100")
    # The program's own variable is a link, the common one is not.
    monkeypatch.setenv("PS_METRICS_PORT", "7009")
    options = context_of("ps-coordinator").params
    assert (options["port"], options["metrics_port"], options["page_port"]) == (7100, "7009", None)


def test_a_port_that_is_none_and_no_link_is_an_error(monkeypatch):
    monkeypatch.setenv("PS_COORDINATOR_PORT", "http://10.0.0.1:7000")
    with pytest.raises(click.BadParameter, match="is not a valid integer"):
        context_of("ps-coordinator")


@pytest.mark.parametrize("scheme", ["tcp", "udp", "sctp"])
def test_a_worker_takes_no_setting_from_them(scheme):
    config = WorkerConfig.from_environment({"PS_COORDINATOR": "coordinator:7000", **links(scheme)})
    assert config == WorkerConfig("coordinator:7000")


def test_a_script_without_an_address_still_runs_alone():
    assert runs_alone(links(), None, None, None)


def test_a_metrics_port_of_a_worker_that_is_none_is_an_error():
    with pytest.raises(ConfigError, match="PS_METRICS_PORT"):
        WorkerConfig.from_environment({"PS_COORDINATOR": "coordinator:7000", "PS_METRICS_PORT": "http://10.0.0.1"})
