"""psctl weights follow beside a real job: a server that reads the directory has what was published, bit for bit."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from ps_server.cli.psctl.main import main
from tests.checkpoint.weight_reader import Server
from tests.support.certificates import made_folder
from tests.support.interpreters import Interpreter
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job


class Trainer:
    """A job whose worker publishes ``policy`` again and again, with few changes from one version to the next."""

    def __init__(self, job: Job) -> None:
        self.model = nn.Sequential(nn.Linear(300, 20), nn.BatchNorm1d(20))
        self.cluster = job.cluster()
        self.optimizer = self.cluster.optimizer(torch.optim.SGD, self.model, lr=1.0)
        self.versions = 0

    def publish(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1)[self.versions] = 1.0
        self.optimizer.step()
        self.versions += 1
        assert self.cluster.publish("policy", self.optimizer, step=10 * self.versions, wait=True) == self.versions

    def assert_served(self, server: Server, dtype: torch.dtype = torch.float32) -> None:
        assert server.version == self.versions
        wanted = self.model.state_dict()
        assert set(server.tensors) == set(wanted)
        for name, value in wanted.items():
            _, shape, data = server.tensors[name]
            exact = value.to(dtype) if value.is_floating_point() else value
            assert shape == tuple(value.shape)
            assert data == exact.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


FOLLOW = ("weights", "follow")


def psctl(job: Job, folder: Path, *more: str) -> Result:
    told = ["weights", "follow", "policy", "--dir", str(folder), "--coordinator", job.address, "--once", *more]
    return CliRunner().invoke(main, told, env={"PS_COORDINATOR": None})


@contextmanager
def following(job: Job, folder: Path) -> Iterator[Interpreter]:
    told = ["weights", "follow", "policy", "--dir", str(folder), "--coordinator", job.address, "-o", "json"]
    process = Interpreter("-c", "from ps_server.entry import psctl; psctl()", *told)
    try:
        yield process
    finally:
        process.close()


def newest(folder: Path) -> str:
    latest = folder / "latest"
    return latest.read_text() if latest.exists() else ""


def test_a_server_follows_a_job_across_a_kill_of_the_command_and_ctrl_c_ends_it(tmp_path):
    server = Server()
    with running_job(shards=2) as job:
        trainer = Trainer(job)
        with following(job, tmp_path) as process:
            lines = []
            for _ in range(3):
                trainer.publish()
                lines.append(json.loads(process.stdout.readline()))
                server.pull(tmp_path)
                trainer.assert_served(server)
            process.send_signal(signal.SIGKILL)
        assert [(line["number"], line["base"], line["step"]) for line in lines] == [
            (1, None, 10),
            (2, 1, 20),
            (3, 2, 30),
        ]
        assert lines[1]["file_bytes"] < lines[1]["full_bytes"] == lines[0]["changed_bytes"]
        trainer.publish()
        with following(job, tmp_path) as process:
            wait_until(lambda: newest(tmp_path) == "weight_v000004")
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
    server.pull(tmp_path)
    trainer.assert_served(server)
    assert server.applied == ["full 1", "delta 2", "delta 3", "delta 4"]
    assert not list(tmp_path.glob(".*"))


def test_once_ends_with_the_newest_version_which_is_in_the_dtype_that_was_asked_for(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with running_job(shards=2) as job:
        trainer, folder = Trainer(job), tmp_path / "versions"
        trainer.publish()
        trainer.publish()
        done = psctl(job, folder, "--dtype", "bfloat16", "--config-from", str(model))
        assert (done.exit_code, done.output.count("\n")) == (0, 1)
        assert done.output.startswith("version 2, step 20: full, ")
        assert psctl(job, folder).output == ""
    server = Server()
    server.pull(folder)
    trainer.assert_served(server, torch.bfloat16)
    assert "config.json" in server.files


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_directory_of_another_job_is_refused_in_a_line_whatever_its_number(tmp_path, number):
    with running_job(shards=1, job_id="first") as job:
        trainer = Trainer(job)
        trainer.publish()
        trainer.publish()
        assert psctl(job, tmp_path).exit_code == 0
        told = [*FOLLOW, "value", "--dir", str(tmp_path), "--coordinator", job.address]
        done = CliRunner().invoke(main, told)
        assert done.exit_code == 1
        assert f"Error: {tmp_path} has the versions of another name; expected: 'policy'; actual: 'value'" in done.output
    with running_job(shards=1, job_id="second") as job:
        trainer = Trainer(job)
        for _ in range(number):
            trainer.publish()
        done = psctl(job, tmp_path)
        assert done.exit_code == 1
        assert f"Error: {tmp_path} does not go on with this job" in done.output
        assert "remedy: give a new directory to a new job" in done.output
        assert newest(tmp_path) == "weight_v000002"
        done = psctl(job, tmp_path / "new", "--config-from", str(tmp_path))
        assert done.exit_code == 2
        assert "is no Hugging Face checkpoint" in done.output


@pytest.mark.parametrize("wrong", [["--keep", "0"], ["--anchor-every", "0"], ["--dtype", "int8"]])
def test_options_that_mean_nothing_are_wrong_usage(tmp_path, wrong):
    told = ["weights", "follow", "policy", "--dir", str(tmp_path), "--coordinator", "127.0.0.1:1", *wrong]
    assert CliRunner().invoke(main, told).exit_code == 2


def test_what_is_not_installed_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "ps_protocol.wire.deltas", raising=False)
    monkeypatch.delitem(sys.modules, "ps_protocol.model.kernels", raising=False)
    told = ["weights", "follow", "policy", "--dir", str(tmp_path / "new"), "--coordinator", "127.0.0.1:1"]
    done = CliRunner().invoke(main, told)
    assert done.exit_code == 2
    assert "needs numba; remedy: pip install 'torch-ps[server]'" in done.output
    assert not (tmp_path / "new").exists()


def test_a_directory_is_followed_over_tls_with_the_token_of_a_reader_and_no_lesser_one(tmp_path):
    lab, folder, server = made_folder(tmp_path / "lab"), tmp_path / "versions", Server()
    with running_job(shards=2, lab=lab) as job:
        trainer = Trainer(job)
        trainer.publish()

        def follow(role: str) -> Result:
            certificate, key = lab.pair(role)
            given = {
                "PS_TLS_CERT": str(certificate),
                "PS_TLS_KEY": str(key),
                "PS_TLS_CA": str(lab.authority_file),
                "PS_TOKEN_FILE": str(lab.path / f"{role}.token"),
            }
            told = ["weights", "follow", "policy", "--dir", str(folder), "--coordinator", job.address, "--once"]
            return CliRunner().invoke(main, told, env={"PS_COORDINATOR": None, **given})

        refused = follow("viewer")
        assert refused.exit_code == 1
        assert "viewer" in refused.output
        assert newest(folder) == ""
        for _ in range(2):
            done = follow("reader")
            assert done.exit_code == 0, done.output
            server.pull(folder)
            trainer.assert_served(server)
            trainer.publish()
        assert server.applied == ["full 1", "delta 2"]
