"""A worker whose payloads go over gRPC keeps the memory of freed chunks. Starts processes with glibc's own settings."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

from ps_worker.transport import grpc_stream
from tests.support.length import choose

_IMPORT = "from ps_worker.transport.grpc_stream import keep_freed_memory"

_FAULTS = f"""
import resource
{_IMPORT}

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


_ITS_SOURCE = f"""
_LARGEST_MAPPED_BYTES = {grpc_stream._LARGEST_MAPPED_BYTES}
{inspect.getsource(inspect.unwrap(grpc_stream.keep_freed_memory)).removeprefix("@cache")}
"""
"""The function alone, in place of its import: an interpreter without torch begins in 20 ms instead of 2 s."""


def _faults(program: str = _FAULTS, **settings: str) -> tuple[int, int]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=kept | settings, check=True, capture_output=True, text=True
    )
    before, after = map(int, ran.stdout.split())
    return before, after


def test_chunks_that_come_and_go_use_the_same_pages_again():
    before, after = _faults(_FAULTS.replace(_IMPORT, choose(_IMPORT, _ITS_SOURCE)))
    assert before > 10_000
    assert after < before // 20


def test_thresholds_that_a_user_has_set_stay():
    alone = _FAULTS.replace(_IMPORT, choose(_IMPORT, _ITS_SOURCE))
    before, after = _faults(alone, MALLOC_TRIM_THRESHOLD_="131072")
    assert before > 10_000
    assert after > before // 2
