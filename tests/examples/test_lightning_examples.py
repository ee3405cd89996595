"""The examples of Lightning and Fabric: a few lines from a script for one process, and they learn. Costs 15 s."""

import difflib

import pytest

from tests.cli import forked
from tests.examples.test_examples import EXAMPLES
from tests.recovery.zygote import shared

ALONE = EXAMPLES.parent / "tests" / "examples" / "alone"
NAMES = ("lightning_digits.py", "fabric_digits.py")


def changed(name: str) -> list[str]:
    """The lines of the example that are not in the script for one process, but for its first line, the docstring."""
    alone, shared_script = ((folder / name).read_text().splitlines()[1:] for folder in (ALONE, EXAMPLES))
    return [line for line in difflib.ndiff(alone, shared_script) if line.startswith(("+ ", "- "))]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_the_script_for_one_process_but_for_five_lines_at_most(name):
    lines = changed(name)
    assert 2 <= len(lines) <= 5, lines
    assert any('strategy="torch_ps"' in line for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(tmp_path, name):
    shared().load("sklearn.datasets", "ps_worker.lightning")
    job = ("--no-progress", "--seed", "1", "--shards", "2", "--workers", "2", "--mode", "sync")
    done = forked.run(tmp_path, *job, str(EXAMPLES / name), "--epochs", "6", "--expect-accuracy", "0.9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(expected at") == 1
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
