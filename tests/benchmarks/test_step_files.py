"""A step passes through few files: a reader can follow it, and what a job does not use is not entered."""

from benchmarks.step_files import files_of_a_step

MOST = 40


def test_a_step_passes_through_few_files_of_worker_and_shard_together():
    files = files_of_a_step(steps=5)
    assert "ps_server/shard/step/model.py" in files
    assert "ps_worker/step/pipeline.py" in files
    assert len(files) <= MOST, "\n".join(files)
