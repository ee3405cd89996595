"""A small run of the whole program."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

import chaos.processes
from chaos import program
from chaos.cluster import TRANSPORTS, Cluster, Size
from tests.support.interpreters import FORKING, alive
from tests.support.length import choose
from tests.support.seeds import drawn_seed

SMALL = ["--minutes", "0.15", "--every", "2.5", "--undisturbed-minutes", "0", "--references", "0", "--workers", "2"]


@pytest.mark.parametrize(
    ("processes", "transport"),
    choose([("forked", "grpc"), ("own interpreters", "bulk"), ("own interpreters", "shm")], [("forked", "grpc")]),
)
@pytest.mark.early
def test_a_small_run_keeps_every_promise_and_leaves_no_process(tmp_path, monkeypatch, capsys, processes, transport):
    seed = drawn_seed()
    words = ["--seed", str(seed), "--folder", str(tmp_path), "--transport", transport, *SMALL]
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shards_and_workers_of_a_run_are_given_its_transport(tmp_path, monkeypatch, transport):
    monkeypatch.setenv("TRANSPORT", transport)
    assert program.arguments([]).transport == transport
    cluster = Cluster(tmp_path, tmp_path / "data", Size(secure=False, transport=transport))
    try:
        commands = {name: process.command(0) for name, process in cluster.processes.items()}
        assert commands["worker 0"][-1] == transport
        assert ("--no-shm" in commands["shard 0"]) is (transport != "shm")
        assert ("--bulk-ports" in commands["shard 0"]) is (transport != "bulk")
    finally:
        cluster.close()


def test_faults_hit_the_relay_that_a_reader_asks_and_its_link_to_the_job(tmp_path):
    cluster = Cluster(tmp_path, tmp_path / "data", Size(secure=False))
    try:
        targets = cluster.targets(None)
        assert "relay" in targets.processes
        assert "relay" not in targets.servers  # nobody replaces one that hangs
        assert "relay–coordinator" in targets.links
        assert cluster.relay_address.rpartition(":")[2] in cluster.processes["relay"].command(1)
    finally:
        cluster.close()


def test_another_transport_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRANSPORT", "tcp")
    with pytest.raises(SystemExit):
        program.arguments([])
    assert "unknown transport 'tcp'; it is grpc, the default, bulk or shm" in capsys.readouterr().err
