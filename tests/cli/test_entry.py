"""Ctrl-C while a command imports its modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ps_server import entry

ROOT = Path(__file__).parents[2]

IMPORTS = """
import os, pathlib, signal, sys, time
print("imports", flush=True)
time.sleep(600)
"""

MAIN = """
import signal, sys
from ps_server import entry
{before}
entry._run("slow")
"""


def interrupted(folder: Path, imports: str, before: str = "") -> tuple[int, str, str]:
    """How a program ends that gets SIGINT after the first line it prints."""
    (folder / "slow.py").write_text(imports)
    paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "protos")))
    program = subprocess.Popen(
        [sys.executable, "-c", MAIN.format(before=before)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    program.stdout.readline()
    program.send_signal(signal.SIGINT)
    output, errors = program.communicate(timeout=60)
    return program.returncode, output, errors


def test_ctrl_c_during_imports_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    assert interrupted(tmp_path, IMPORTS) == (-signal.SIGINT, "", "")


def test_after_the_imports_it_is_the_commands_own(tmp_path: Path) -> None:
    imports = """
import time
def program():
    try:
        print("runs", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        raise SystemExit(7)
"""
    assert interrupted(tmp_path, imports) == (7, "", "")


def test_a_command_that_ignores_ctrl_c_as_one_in_the_background_goes_on(tmp_path: Path) -> None:
    imports = IMPORTS.replace("time.sleep(600)", "time.sleep(0.3)") + "def program(): sys.exit(0)"
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert interrupted(tmp_path, imports, before) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "target"),
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items(),
)
def test_every_command_is_one_of_them(command: str, target: str) -> None:
    assert target == f"ps_server.entry:{command.replace('-', '_')}"
    assert callable(getattr(entry, command.replace("-", "_")))
