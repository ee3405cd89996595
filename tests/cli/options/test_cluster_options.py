"""What a coordinator is told about leases, slices and its port can be said to ps-run, by flag, environment or file."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ps_server.cli.launcher import main as launcher
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.programs import Programs
from ps_server.coordinator import main as coordinator

#: Every flag with a value that is not its default.
GIVEN = {
    "--partition": "max",
    "--partition-slices": "3",
    "--partition-bytes": "4096",
    "--lease-seconds": "90.0",
    "--heartbeat-seconds": "2.5",
    "--max-model-bytes": "1048576",
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of coordinators that ps-run would start."""
    found: list[list[str]] = []

    class NoRun:
        def __init__(self, supervisor: object, programs: Programs, *_: object) -> None:
            found.append(programs.command(ProcessName(ProcessRole.COORDINATOR, 0), ""))

        def run(self) -> int:
            return 0

    monkeypatch.setattr(launcher, "Runner", NoRun)
    return found


def run(*flags: str, **environment: str) -> None:
    result = CliRunner().invoke(launcher.main, [*flags, __file__], env=environment)
    assert result.exit_code == 0, result.output


def flag_values(command: list[str]) -> dict[str, str]:
    return {flag: command[command.index(flag) + 1] for flag in (*GIVEN, "--port") if flag in command}


def test_nothing_is_passed_on_that_was_not_given(told: list[list[str]]) -> None:
    run()
    assert flag_values(told[0]) == {"--port": "0"}


def test_flags_reach_the_coordinator_which_understands_them(told: list[list[str]]) -> None:
    run(*(part for pair in GIVEN.items() for part in pair), "--port", "7123")
    assert flag_values(told[0]) == {**GIVEN, "--port": "7123"}
    arguments = told[0][told[0].index("--bind") :]
    context = coordinator.main.make_context("ps-coordinator", arguments)
    assert (context.params["lease_seconds"], context.params["partition"]) == (90.0, "max")


def test_flags_go_before_the_environment_and_that_before_the_file(told: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("lease-seconds = 30.0\nheartbeat-seconds = 3.0\npartition-bytes = 8192\n")
    environment = {"PS_RUN_LEASE_SECONDS": "40", "PS_RUN_HEARTBEAT_SECONDS": "4"}
    run("--config", str(file), "--lease-seconds", "50", **environment)
    expected = {"--lease-seconds": "50.0", "--heartbeat-seconds": "4.0", "--partition-bytes": "8192", "--port": "0"}
    assert flag_values(told[0]) == expected


def test_a_key_that_is_no_option_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("leases = 3\n")
    result = CliRunner().invoke(launcher.main, ["--config", str(file), __file__])
    assert result.exit_code == 2
    assert "unknown keys: leases" in result.output


def test_a_flag_without_a_value_is_passed_on(told: list[list[str]], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for given in ("--rebalance",), ():
        CliRunner().invoke(launcher.main, [*given, str(script)])
    assert [("--rebalance" in command) for command in told] == [True, False]
    CliRunner().invoke(launcher.main, [str(script)], env={"PS_RUN_REBALANCE": "0"})
    assert "--rebalance" not in told[-1]
