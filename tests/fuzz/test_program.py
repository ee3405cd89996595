"""A small run of the whole program: every role of real processes, a job beside it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from google.protobuf.message import DecodeError

import chaos.processes
from fuzz import program
from fuzz.messages import Generator
from ps_protocol.v1 import coordinator_pb2, shard_pb2
from tests.support.interpreters import FORKING, alive
from tests.support.length import choose
from tests.support.seeds import drawn_seed


@pytest.mark.parametrize("processes", choose(["forked", "own interpreters"], ["forked"]))
@pytest.mark.early
def test_mutated_messages_harm_nobody_and_no_process_is_left(tmp_path, monkeypatch, processes):
    seed, messages = drawn_seed(), choose(600, 300)
    if processes == "forked":
        monkeypatch.setattr(chaos.processes, "subprocess", FORKING)
        assert program.run(program.ROLES, seed, messages, tmp_path) == []
    else:
        told = ["--seed", str(seed), "--messages", str(messages), "--folder", str(tmp_path)]
        command = [sys.executable, "-m", "fuzz", *told]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        assert done.returncode == 0
        assert done.stdout.endswith(f"seed {seed}: nothing was harmed\n")
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == alive() == []


def test_the_same_seed_makes_the_same_messages():
    def some(seed: int) -> list[bytes]:
        generator = Generator(seed, {})
        kinds = (shard_pb2.StepRequest, coordinator_pb2.DeclareModelRequest)
        return [generator.bytes_of(kind, lambda message: True) for kind in kinds for _ in range(50)]

    assert some(7) == some(7)
    assert some(7) != some(8)


def test_what_is_not_allowed_is_never_made():
    generator = Generator(3, {"incarnation": (5, 6)})
    for _ in range(300):
        data = generator.bytes_of(coordinator_pb2.HeartbeatRequest, lambda message: message.incarnation != 5)
        with suppress(DecodeError, UnicodeDecodeError):
            assert coordinator_pb2.HeartbeatRequest.FromString(data).incarnation != 5
