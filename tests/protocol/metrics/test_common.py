"""The metrics of every process, against what this process knows of itself."""

import platform
import resource
import time
from pathlib import Path

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.metrics.common import _version, read_common


def found():
    return {(sample.metric.name.removeprefix("torch_ps_"), *sample.labels): sample.value for sample in read_common()}


def test_the_build_is_named_and_the_start_is_in_the_past():
    first = found()
    assert first["build_info", _version(), str(PROTOCOL_VERSION), platform.python_version()] == 1
    assert 0 < first["start_time_seconds",] <= time.time()


def test_work_of_the_process_is_cpu_time_of_its():
    before, began = found()["process_cpu_seconds_total",], time.process_time()
    while time.process_time() - began < 0.02:
        pass
    assert found()["process_cpu_seconds_total",] - before >= 0.02


def test_the_peak_of_memory_is_in_bytes_and_covers_what_is_resident_now():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize()
    # The kernel counts pages per thread and adds them up now and then.
    assert 0.9 * resident <= found()["process_peak_memory_bytes",] < 1000 * resident
