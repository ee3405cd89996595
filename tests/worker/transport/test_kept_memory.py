"""A worker whose payloads go over gRPC keeps the memory of freed chunks. Starts processes with glibc's own settings."""

from __future__ import annotations

import os
import subprocess
import sys

_FAULTS = """
import resource
from ps_worker.transport.grpc_stream import keep_freed_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        chunks = [bytearray(1 << 20) for _ in range(4)]
        del chunks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""
"""Page faults while chunks of 1 MB come and go, before and after."""


def _faults(**settings: str) -> tuple[int, int]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=kept | settings, check=True, capture_output=True, text=True
    )
    before, after = map(int, ran.stdout.split())
    return before, after


def test_chunks_that_come_and_go_use_the_same_pages_again():
    before, after = _faults()
    assert before > 10_000
    assert after < before // 20


def test_thresholds_that_a_user_has_set_stay():
    before, after = _faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert after > before // 2
