"""A small run of the whole program."""

from __future__ import annotations

import random
import subprocess
import sys

import psutil


def test_a_small_run_keeps_every_promise_and_leaves_no_process(tmp_path):
    seed = random.SystemRandom().randrange(1 << 20)
    short = ["--minutes", "0.15", "--every", "2.5", "--undisturbed-minutes", "0", "--references", "0", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "chaos", "--seed", str(seed), "--folder", str(tmp_path), *short],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    assert "replay      of each shard's log and the parameters served: the same bits" in done.stdout
    assert done.stdout.endswith(f"seed {seed}: every promise kept\n")
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []
