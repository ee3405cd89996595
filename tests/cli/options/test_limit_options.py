"""Every limit has an option of its own, by flag and by environment, whose default is the one of the settings."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from ps_protocol.model.spec import Consistency
from ps_server.cli.launcher import main as launcher
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.psctl import main as psctl
from ps_server.coordinator import main as coordinator
from ps_server.limits import JobLimits, ServerLimits, ShardLimits
from ps_server.settings import given_settings, options, settings_of
from ps_server.shard import main as shard


def defaults(command: click.Command) -> dict[str, object]:
    return {str(each.name): each.default for each in command.params}


@pytest.mark.parametrize(
    ("program", "kinds"),
    [(coordinator, (ServerLimits, JobLimits)), (shard, (ShardLimits,))],
    ids=lambda each: str(each),
)
def test_every_limit_is_an_option_of_its_program_and_of_ps_run(program, kinds):
    for kind in kinds:
        wanted = {name: field.default for name, field in settings_of(kind).items()}
        assert wanted.items() <= defaults(program.main).items()
        assert wanted.items() <= defaults(launcher.main).items()


def test_limits_of_shards_alone_are_no_options_of_the_coordinator():
    assert not (settings_of(ShardLimits).keys() - settings_of(ServerLimits)) & defaults(coordinator.main).keys()


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
    @options(ShardLimits, JobLimits)
    @click.pass_context
    def program(context, **values):
        given.extend([given_settings(context, ServerLimits, JobLimits), given_settings(context, ShardLimits)])

    flags = ["--max-calls", "7", "--max-models", "3", "--max-feeds", "4", "--token-seconds", "2.5"]
    result = CliRunner().invoke(program, flags, env={"PS_RUN_UPLOAD_MB": "9"})
    assert result.exit_code == 0, result.output
    assert given == [
        {"max_calls": 7, "max_models": 3},
        {"max_calls": 7, "max_feeds": 4, "token_seconds": 2.5, "upload_mb": 9},
    ]


def test_programs_of_ps_run_get_their_limits():
    programs = Programs(
        Script(("python", "train.py")),
        Consistency(),
        1,
        1,
        1,
        coordinator_settings={"max_models": 3},
        shard_settings={"max_feeds": 4},
    )
    shard_command = programs.command(ProcessName(ProcessRole.SHARD, 0), "127.0.0.1:1")
    coordinator_command = programs.command(ProcessName(ProcessRole.COORDINATOR, 0), "")
    assert shard_command[-2:] == ["--max-feeds", "4"]
    assert coordinator_command[-2:] == ["--max-models", "3"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("program", [coordinator, shard, launcher, psctl], ids=lambda each: each.__name__)
def test_no_option_takes_a_number_that_no_timer_takes(program, value):
    commands = [program.main, *getattr(program.main, "commands", {}).values()]
    numbers = [
        each for command in commands for each in command.params if isinstance(each.type, click.types.FloatParamType)
    ]
    assert numbers
    for each in numbers:
        with pytest.raises(click.BadParameter):
            each.type.convert(value, each, None)
