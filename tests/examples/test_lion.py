"""The example of a user's optimizer through ps-run, with interpreters of its own: under TEST_LENGTH=full."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LION = Path(__file__).parents[2] / "examples" / "lion"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_lion_learns_on_two_shards(tmp_path, mode):
    job = ("--no-progress", "--shards", "2", "--workers", "2", "--mode", mode, "--optimizers", "lion")
    command = [sys.executable, "-m", "ps_server.cli.launcher.main", *job, str(LION / "train.py")]
    environment = {**os.environ, "PYTHONPATH": str(LION)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"worker 0: step \d+, loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2
