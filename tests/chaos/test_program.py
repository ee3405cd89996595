"""A small run of the whole program."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

import chaos.processes
from chaos import program
from tests.support.interpreters import FORKING, alive
from tests.support.length import choose
from tests.support.seeds import drawn_seed

SMALL = ["--minutes", "0.15", "--every", "2.5", "--undisturbed-minutes", "0", "--references", "0", "--workers", "2"]


@pytest.mark.parametrize("processes", choose(["forked", "own interpreters"], ["forked"]))
def test_a_small_run_keeps_every_promise_and_leaves_no_process(tmp_path, monkeypatch, capsys, processes):
    seed = drawn_seed()
    words = ["--seed", str(seed), "--folder", str(tmp_path), *SMALL]
    if processes == "forked":
        monkeypatch.setattr(chaos.processes, "subprocess", FORKING)
        code = program.run(program.arguments(words), tmp_path, own_disk=False)
        output = capsys.readouterr().out
    else:
        command = [sys.executable, "-m", "chaos", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        code, output = done.returncode, done.stdout
    print(output)
    assert code == 0
    assert "replay      of each shard's log and the parameters served: the same bits" in output
    assert output.endswith(f"seed {seed}: every promise kept\n")
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == alive() == []
