"""torchrun starts workers of a job with servers, ends them and starts them again. 12 s of CPU (full length)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ps_protocol.cluster.view import Role
from ps_protocol.launch.ports import free_port
from tests.cli.launcher.jobs import wait_until
from tests.worker.jobs import running_job

RUN_SECONDS = 240

TRAIN = """
import os, pathlib, sys, torch, ps_worker
with ps_worker.connect(device="cpu") as cluster:
    model = torch.nn.Linear(2, 1)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01, name="model")
    begun = pathlib.Path(f"{cluster.rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 2)).square().mean().backward()
        optimizer.step()
        if step == 4:
            begun.write_text(str(os.getpid()))
            while "--wait" in sys.argv and begun.name in ("0-0", "1-0"):
                optimizer.zero_grad()
                model(torch.randn(8, 2)).square().mean().backward()
                optimizer.step()
    print(f"rank {cluster.rank} of {os.environ['RANK']} in {cluster.world_size}", flush=True)
"""


class Torchrun:
    """``torchrun --nproc-per-node 2`` of the script in ``folder``."""

    def __init__(self, folder: Path, *flags: str, arguments: tuple[str, ...] = (), **environment: str) -> None:
        (folder / "train.py").write_text(TRAIN)
        places = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *places, *flags, "train.py"]
        self._out = (folder / "out").open("w+")
        self._process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    def ends(self) -> int:
        return self._process.wait(RUN_SECONDS)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        self._out.seek(0)
        return self._out.read()

    def close(self) -> None:
        if self._process.poll() is None:
            # It ends its workers.
            self._process.terminate()
            self._process.wait(RUN_SECONDS)
        self._out.close()


@pytest.fixture
def torchrun(tmp_path):
    started: list[Torchrun] = []

    def start(*flags: str, **options) -> Torchrun:
        started.append(Torchrun(tmp_path, *flags, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.long
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_rank_and_host_come_from_the_variables_of_torchrun(torchrun):
    with running_job(2, workers=2) as job:
        run = torchrun(PS_COORDINATOR=":" + job.address.rpartition(":")[2])
        assert run.ends() == 0, run.output()
        assert sorted(re.findall(r"rank \d of \d in \d", run.output())) == ["rank 0 of 0 in 2", "rank 1 of 1 in 2"]
        assert [job.gone(rank) for rank in (0, 1)] == ["left", "left"]
        assert [job.member(Role.WORKER, rank).stats.steps for rank in (0, 1)] == [10, 10]
        told = "the shards have told of all steps"
        wait_until(lambda: [job.member(Role.SHARD, index).stats.version for index in (0, 1)] == [20, 20], told)


@pytest.mark.long
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_a_killed_worker_is_started_again_with_the_others_and_they_get_their_ranks(torchrun, tmp_path):
    with running_job(2, workers=2) as job:
        run = torchrun("--max-restarts", "1", arguments=("--wait",), PS_COORDINATOR=job.address)
        first = [tmp_path / "0-0", tmp_path / "1-0"]
        wait_until(lambda: run.ended() or all(each.exists() and each.read_text() for each in first), "both train")
        assert not run.ended(), run.output()
        os.kill(int(first[1].read_text()), signal.SIGKILL)
        assert run.ends() == 0, run.output()
        assert sorted(re.findall(r"rank \d of \d in \d", run.output())) == ["rank 0 of 0 in 2", "rank 1 of 1 in 2"]
        assert [(tmp_path / f"{rank}-1").exists() for rank in (0, 1)] == [True, True]
        assert [job.member(Role.WORKER, rank).stats.steps for rank in (0, 1)] == [10, 10]
        ends = [each.gone for each in job.client.get_status().members if each.gone]
        # torchrun ends the other one with SIGTERM, at which it finishes its step and leaves.
        assert sorted(each.partition(":")[0] == "left" for each in ends) == [False, True, True, True], ends
        assert [each for each in ends if "SIGTERM" in each] == ["left: Terminated: the process received SIGTERM"]
