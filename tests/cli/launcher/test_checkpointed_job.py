"""ps-run --checkpoint-dir over real servers: a checkpoint at every end, from which another job goes on."""

import re
import signal

from ps_server.checkpoint.folder.directory import committed
from ps_server.checkpoint.read.checkpoint import Checkpoint
from tests.cli.launcher.training import HALF, STEPS, UNDISTURBED

SAVED = ("--checkpoint-dir", "saved")


def versions(folder):
    """The version that each kept checkpoint holds."""
    models = [Checkpoint.open(path).model("model") for path in committed(folder)]
    return [model.facts[0]["tracker"]["version"] for model in models]


def test_a_job_that_ends_leaves_a_checkpoint(training, tmp_path):
    job = training(*SAVED)
    job.go_on()
    assert job.ends() == 0, job.output
    assert versions(tmp_path / "saved") == [STEPS]


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


def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(training):
    job = training("--restore", "nowhere")
    assert job.ends() != 0
    assert re.search(r"nowhere is not a complete checkpoint", job.output)
