"""The file for liveness probes: new while a worker's threads run, old where it stands still, gone when it has left."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ps_protocol.errors import ConfigError, Fenced
from ps_worker.session import alive
from ps_worker.session.config import WorkerConfig
from ps_worker.session.session import Session
from tests.support.interpreters import Interpreter
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

OLD = 1000.0

WORKER = """
import sys, time
import ps_worker
from ps_worker import times

times.TOUCH_SECONDS = 0.02
with ps_worker.connect(sys.argv[1], device="cpu"):
    print("joined", flush=True)
    # A step that takes its time.
    time.sleep(600.0)
"""


def grow_old(file: Path) -> None:
    os.utime(file, (OLD, OLD))


def stays_old(file: Path) -> bool:
    grow_old(file)
    time.sleep(0.1)  # time for what must not happen
    return is_old(file)


def is_old(file: Path) -> bool:
    return file.stat().st_mtime == OLD


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_worker.times.TOUCH_SECONDS", 0.02)


def test_the_file_is_touched_as_long_as_the_worker_is_a_member(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    with running_job() as job:
        session = Session.join(replace(job.config(), alive_file=file))
        for _ in range(2):
            grow_old(file)
            wait_until(lambda: not is_old(file))
        session.leave()
        session.close()
        session.close()
        assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_worker_that_lost_its_place_grows_old(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    with running_job() as job:
        session = Session.join(replace(job.config(rank=0), alive_file=file))
        try:
            job.cluster(rank=0, take_over=True)
            assert session._alive is not None
            wait_until(lambda: session._alive is not None and not session._alive._thread.is_alive())
            with pytest.raises(Fenced):
                session.check()
            assert file.exists()
        finally:
            session.close()
        assert not file.exists()


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with running_job() as job:
        with pytest.raises(ConfigError, match="correct PS_ALIVE_FILE"):
            Session.join(replace(job.config(), alive_file=tmp_path / "none" / "alive"))
        assert "waiting" in job.gone(0)


def test_a_file_that_cannot_be_written_any_more_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tells = alive.AliveFile(folder / "alive")
    (folder / "alive").unlink()
    folder.rmdir()
    wait_until(lambda: "liveness probes cannot be written" in caplog.text)
    folder.mkdir()
    wait_until((folder / "alive").exists)
    tells.remove()
    assert caplog.text.count("liveness probes cannot be written") <= 2
    assert list(folder.iterdir()) == []


def test_a_slow_step_is_told_from_a_process_that_stands_still(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    with running_job() as job:
        worker = Interpreter("-c", WORKER, job.address, PS_ALIVE_FILE=str(file))
        try:
            assert worker.stdout.readline() == "joined\n"
            grow_old(file)
            wait_until(lambda: not is_old(file))
            worker.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
            # The first of its threads has stopped; another may be about to.
            wait_until(lambda: stays_old(file))
            worker.send_signal(signal.SIGCONT)
            wait_until(lambda: not is_old(file))
        finally:
            worker.close()


def test_the_variable_names_the_file() -> None:
    assert WorkerConfig.from_environment({"PS_ALIVE_FILE": "/tmp/alive"}, coordinator="a:1").alive_file == Path(
        "/tmp/alive"
    )
    assert WorkerConfig.from_environment({"PS_ALIVE_FILE": ""}, coordinator="a:1").alive_file is None
