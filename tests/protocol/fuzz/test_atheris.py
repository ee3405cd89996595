"""Coverage-guided fuzzing of what reads a worker's bytes; as many runs each time, from the same seed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import STEP_REQUESTS
from ps_protocol.wire.frames import encode_chunk

RUNS = 60_000
SEED = 20240229
TARGET = "tests.protocol.fuzz.atheris_target"
ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed: pip install 'torch-ps[fuzz]'")
def test_no_input_that_coverage_leads_to_breaks_a_reader(tmp_path: Path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    examples = [
        b"\0" + encode_chunk(STEP_REQUESTS.field, 0, [b"12345678"]),
        b"\0" + encode_chunk(STEP_REQUESTS.field, 1 << 40, [b"x"]),
        b"\1" + pb.StepRequest(push=pb.PushHeader(sequence=1, clock=1, absent=[0])).SerializeToString(),
        b"\1" + pb.StepRequest(stage=pb.Stage(begin=0, end=4, payload=b"1234")).SerializeToString(),
        b"\2" + b"\x00\x00\x40\x00",
        b"\3" + common_pb2.Wire(format=common_pb2.WIRE_FORMAT_TOPK, ratio=0.5).SerializeToString(),
        b"\3" + b"topk:0.25",
    ]
    for number, example in enumerate(examples):
        (corpus / str(number)).write_bytes(example)
    limits = [f"-atheris_runs={RUNS}", f"-seed={SEED}", "-max_len=128", f"-artifact_prefix={tmp_path}/"]
    command = [sys.executable, "-m", TARGET, *limits, str(corpus)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert f"Done {RUNS}" in done.stderr, done.stderr[-2000:]
