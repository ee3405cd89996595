"""How the process of a server ends: at once, with its exit code, and with everything it wrote."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, click
from ps_server.cli.options.common import run_program

atexit.register(print, "torn down")

@click.command()
@click.option("--code", type=int, default=0)
@click.option("--how", default="return")
def main(code, how):
    print("last words")
    if how == "raise":
        raise RuntimeError("unforeseen")
    if how == "say":
        sys.exit("why")
    if how == "exit":
        sys.exit(code)

run_program(main)
"""


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-c", PROGRAM, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code"), [((), 0), (("--how", "exit", "--code", "3"), 3), (("--code", "word"), 2)]
)
def test_a_program_ends_at_once_with_its_code_and_its_output(arguments, code):
    done = ran(*arguments)
    assert done.returncode == code
    assert ("last words" in done.stdout) == (code != 2)
    assert "torn down" not in done.stdout


@pytest.mark.parametrize(("how", "text"), [("raise", "RuntimeError: unforeseen"), ("say", "why")])
def test_what_is_no_exit_code_is_shown_as_ever(how, text):
    done = ran("--how", how)
    assert done.returncode == 1
    assert text in done.stderr
