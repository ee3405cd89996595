"""Every limit has an option of its own, by flag and by environment, whose default is the one of the settings."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from ps_protocol.model.spec import Consistency
from ps_server.cli.launcher import main as launcher
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.options.limits import every_limit_option, limit_flags
from ps_server.coordinator import main as coordinator
from ps_server.limits import JobLimits, ServerLimits
from ps_server.shard import main as shard

OF_SHARDS = {"first_message_seconds", "max_feeds", "max_peer_feeds", "max_side_handshakes", "token_seconds"}
#: --max-model-bytes is an option of the cluster's.
DERIVED = {"max_model_bytes"}

SERVER = list(fields(ServerLimits))
JOB = [field for field in fields(JobLimits) if field.name not in DERIVED]


def options(command) -> dict[str, object]:
    return {each.name: each for each in command.params}


@pytest.mark.parametrize("field", SERVER, ids=lambda field: field.name)
def test_a_limit_of_servers_is_an_option_of_shards_and_where_it_applies_of_coordinators(field):
    assert options(shard.main)[field.name].default == field.default
    if field.name in OF_SHARDS:
        assert field.name not in options(coordinator.main)
    else:
        assert options(coordinator.main)[field.name].default == field.default


@pytest.mark.parametrize("field", JOB, ids=lambda field: field.name)
def test_a_limit_of_the_job_is_an_option_of_the_coordinator(field):
    assert options(coordinator.main)[field.name].default == field.default


@pytest.fixture
def configured(monkeypatch):
    found = []

    def run(main) -> None:
        pass

    def configure(options_, given, kept):
        found.append(original(options_, given, kept))
        return found[-1]

    original = coordinator.configure
    monkeypatch.setattr(coordinator, "configure", configure)
    monkeypatch.setattr("ps_server.serving.grpc_server.run", run)
    return found


def test_flags_and_environment_reach_the_coordinator(configured):
    flags = ["--max-calls", "7", "--max-models", "3", "--max-name-bytes", "32", "--max-model-bytes", "4096"]
    result = CliRunner().invoke(coordinator.main, flags, env={"PS_COORDINATOR_MAX_PEER_CALLS": "5"})
    assert result.exit_code == 0, result.output
    (config,) = configured
    assert (config.limits.max_calls, config.limits.max_peer_calls) == (7, 5)
    limits = config.cluster.limits
    assert (limits.max_models, limits.max_name_bytes, limits.max_model_bytes) == (3, 32, 4096)
    assert limits.max_variable_name_bytes == 512


def test_flags_and_environment_reach_the_shard(monkeypatch):
    found = []
    monkeypatch.setattr(shard, "serving", lambda: lambda config, stop: found.append(config))
    monkeypatch.setattr("ps_server.serving.grpc_server.run", lambda main: main(None))
    flags = ["--shard", "0", "--coordinator", "127.0.0.1:1", "--max-feeds", "4", "--token-seconds", "2.5"]
    result = CliRunner().invoke(shard.main, flags, env={"PS_SERVER_MAX_SIDE_HANDSHAKES": "9"})
    assert result.exit_code == 0, result.output
    (config,) = found
    assert config.limits.max_feeds == 4
    assert (config.side_channels.token_seconds, config.side_channels.max_handshakes) == (2.5, 9)


@pytest.mark.parametrize("flag", ["--max-calls", "--handshake-seconds", "--max-connections"])
def test_a_limit_of_nothing_is_refused(flag):
    result = CliRunner().invoke(coordinator.main, [flag, "0"])
    assert result.exit_code == 2
    assert flag in result.output


def test_ps_run_passes_limits_on_to_the_servers_that_have_them():
    given = []

    @click.command(context_settings={"auto_envvar_prefix": "PS_RUN"})
    @every_limit_option
    @click.pass_context
    def program(context, **others):
        assert others == {}
        given.append(limit_flags(context))

    flags = ["--max-calls", "7", "--max-models", "3", "--max-feeds", "4", "--token-seconds", "2.5"]
    result = CliRunner().invoke(program, flags, env={"PS_RUN_UPLOAD_MB": "9"})
    assert result.exit_code == 0, result.output
    assert given == [
        (
            ("--max-calls", "7", "--max-models", "3"),
            ("--max-calls", "7", "--max-feeds", "4", "--token-seconds", "2.5", "--upload-mb", "9"),
        )
    ]


def test_ps_run_has_every_limit():
    flags = {flag for each in launcher.main.params for flag in each.opts}
    wanted = [*SERVER, *JOB]
    assert {f"--{each.name.replace('_', '-')}" for each in wanted} <= flags
    assert {"--answer-mb", "--upload-mb", "--max-model-bytes"} <= flags


def test_programs_of_ps_run_get_their_limits():
    programs = Programs(
        Script(("python", "train.py")),
        Consistency(),
        1,
        1,
        1,
        coordinator_flags=("--max-models", "3"),
        shard_flags=("--max-feeds", "4"),
    )
    shard_command = programs.command(ProcessName(ProcessRole.SHARD, 0), "127.0.0.1:1", "ready")
    coordinator_command = programs.command(ProcessName(ProcessRole.COORDINATOR, 0), "", "ready")
    assert shard_command[-2:] == ["--max-feeds", "4"]
    assert coordinator_command[-2:] == ["--max-models", "3"]
