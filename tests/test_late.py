"""``make test-late`` holds threads up, of every process that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LATE = Path(__file__).with_name("late")
ASK = "import sys, threading; print(sys.getprofile(), threading.getprofile())"


def said(**environment: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "LATE_SEED"}
    command = [sys.executable, "-c", ASK]
    return subprocess.run(
        command, env=variables | environment, check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_threads_are_held_up_where_the_environment_has_a_seed() -> None:
    assert said(PYTHONPATH=str(LATE), LATE_SEED="7").count("hold_up") == 2
    assert said(PYTHONPATH=str(LATE)) == "None None\n"
