"""ps-run --checkpoint-dir over real servers: a checkpoint at every end, from which another job goes on."""

import re
import signal

import pytest

from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed
from tests.cli.launcher.training import HALF, STEPS, UNDISTURBED

SAVED = ("--checkpoint-dir", "saved")


def versions(folder):
    """The version that each kept checkpoint holds."""
    models = [Checkpoint.open(path).model("model") for path in committed(folder)]
    return [model.facts[0]["tracker"]["version"] for model in models]


def test_a_job_that_is_told_to_stop_leaves_a_checkpoint_and_another_goes_on_from_it_on_more_shards(training, tmp_path):
    job = training(*SAVED)
    job.says("half-way")
    job.send(signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.output
    assert versions(tmp_path / "saved") == [HALF]
    again = training(*SAVED, "--restore", "latest", "--shards", "2")
    assert again.ends() == 0, again.output
    assert f"started at {HALF}\n" in again.output
    assert versions(tmp_path / "saved") == [HALF, STEPS]


def test_on_as_many_shards_the_bits_are_those_of_an_undisturbed_training(training, tmp_path):
    job = training(*SAVED)
    job.says("half-way")
    job.send(signal.SIGINT)
    job.ends()
    again = training(*SAVED, "--restore", "saved/checkpoint-00000001")
    assert again.ends() == 0, again.output
    assert UNDISTURBED in again.output


def test_another_job_goes_on_from_a_step_that_is_named(training, tmp_path):
    job = training(*SAVED)
    job.says("half-way")
    job.send(signal.SIGTERM)
    job.ends()
    other = training(*SAVED, "--restore", f"step={HALF + 1}")
    assert other.ends() != 0
    assert re.search(rf"no complete checkpoint in .* is of step {HALF + 1}; expected: {HALF};", other.output)
    again = training(*SAVED, "--restore", f"step={HALF}")
    assert again.ends() == 0, again.output
    assert f"started at {HALF}\n" in again.output


def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(training):
    job = training("--restore", "nowhere")
    assert job.ends() != 0
    assert re.search(r"nowhere is not a complete checkpoint", job.output)


def test_a_last_checkpoint_that_cannot_be_written_is_told_with_the_exit_code_and_the_older_one(training, tmp_path):
    job = training(*SAVED)
    job.says("half-way")
    (tmp_path / "saved").rmdir()
    (tmp_path / "saved").touch()
    job.go_on()
    assert job.ends() == 74, job.output
    assert re.search(r"Error: the last checkpoint was not written: .*Not a directory", job.output), job.output
    assert "coordinator exited with code 74: the last checkpoint was not written\n" in job.output
    assert "ended with exit code 74 after" in job.output
    assert "the last checkpoint was not written; there is none\n" in job.output


@pytest.mark.parametrize("flags", [(), ("--shards", "2")])
def test_a_folder_that_cannot_be_written_is_told_before_anything_starts(training, tmp_path, flags):
    (tmp_path / "file").touch()
    job = training("--checkpoint-dir", "file/saved", *flags)
    assert job.ends() == 2, job.output
    (said,) = job.output.splitlines()
    assert re.fullmatch(
        r"Error: the checkpoint files at .*/file/saved cannot be used: Not a directory; remedy: .*", said
    )
