"""A step passes through few files: a reader can follow it, and what a job does not use is not entered."""

import pytest

from benchmarks.step_files import calls_of_a_step, files_of_a_step, of_packages

MOST = 40
#: Functions that a small step enters; on a busy machine some pushes come in parts, and take more.
MOST_CALLS = {"ps_worker": 55, "ps_server": 70, "protos/ps_protocol": 35}


@pytest.mark.parametrize("transport", ["bulk", "shm"])
def test_a_small_step_enters_few_functions(transport):
    calls = calls_of_a_step(transport, steps=50)
    for package, count in of_packages(calls).items():
        assert round(count) <= MOST_CALLS[package], "\n".join(f"{each:5.2f} {name}" for name, each in calls.items())


def test_a_step_passes_through_few_files_of_worker_and_shard_together():
    files = files_of_a_step(steps=5)
    assert "ps_server/shard/step/model.py" in files
    assert "ps_worker/step/pipeline.py" in files
    assert len(files) <= MOST, "\n".join(files)
