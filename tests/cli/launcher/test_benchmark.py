"""ps-run benchmark: the table of given runs, and a real run of a script that does nothing. 3 CPU seconds."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ps_server.cli.launcher.benchmark import Run, command_of, measure, table
from ps_server.cli.launcher.main import main
from tests.support.length import choose

EXAMPLE = Path(__file__).parents[3] / "examples" / "strategies.py"

EVERY = ["one_device", "mirrored", "multi_worker_mirrored", "central_storage", "parameter_server"]


def test_strategies_take_turns_and_one_that_failed_is_not_run_again():
    order = []

    def run(command):
        order.append(command[0])
        return Run(1.0, "exit code 1" if command == ["b"] else "")

    runs = measure({"one": ["a"], "other": ["b"]}, 3, run)
    assert order == ["a", "b", "a", "a"]
    assert {name: len(its) for name, its in runs.items()} == {"one": 3, "other": 1}


def test_the_table_begins_with_the_fastest_and_ends_with_failures():
    runs = {
        "tpu": [Run(0.1, "exit code 1: no TPU")],
        "mirrored": [Run(3.0), Run(2.0), Run(9.0)],
        "one_device": [Run(1.5)],
    }
    assert [line.split() for line in table(runs)] == [
        ["strategy", "median", "s", "least", "most", "runs"],
        ["one_device", "1.50", "1.50", "1.50", "1"],
        ["mirrored", "3.00", "2.00", "9.00", "3"],
        ["tpu", "exit", "code", "1:", "no", "TPU"],
    ]


def test_a_run_is_ps_run_with_the_strategy():
    command = command_of("mirrored", 2, "train.py", ["--lr", "1"])
    assert command[4:] == ["--no-progress", "--strategy", "mirrored", "--workers", "2", "train.py", "--lr", "1"]
    assert "--workers" not in command_of("one_device", 2, "train.py", [])


def test_a_script_is_run_under_each_strategy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit('no GPU' if os.environ['PS_STRATEGY'] == 'tpu' else 0)\n")
    arguments = ["benchmark", "--strategies", "one_device,tpu", "--repeats", "1", str(script)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert re.search(r"^one_device +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d +1$", done.output, re.MULTILINE)
    assert re.search(r"^tpu +exit code 1: .*no GPU", done.output, re.MULTILINE)


TRIVIAL = "import os\nassert os.environ['PS_STRATEGY'] == 'one_device'\n"


@pytest.mark.parametrize(
    ("name", "code"), choose([(name, EXAMPLE.read_text()) for name in EVERY], [("one_device", TRIVIAL)])
)
def test_a_script_that_trains_is_measured(tmp_path, name, code):
    script = tmp_path / "script.py"
    script.write_text(code)
    shutil.copy(EXAMPLE.with_name("digits.py"), tmp_path)
    arguments = ["benchmark", "--strategies", name, "--workers", "2", "--repeats", "1", str(script)]
    done = CliRunner().invoke(main, [*arguments, "--epochs", "1", "--expect-accuracy", "0"])
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == [name]
    assert "exit code" not in done.output


@pytest.mark.parametrize(
    ("strategies", "message"), [("mirorred", "unknown strategy 'mirorred'"), (",", "--strategies names none")]
)
def test_names_are_checked_before_anything_runs(tmp_path, strategies, message):
    script = tmp_path / "script.py"
    script.touch()
    done = CliRunner().invoke(main, ["benchmark", "--strategies", strategies, str(script)])
    assert done.exit_code == 2
    assert message in done.output
