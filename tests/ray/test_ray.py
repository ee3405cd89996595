"""Jobs in a real Ray cluster of this machine: whole jobs, processes killed, nothing left. Runs under make test-long,
where Ray is installed (extra ``ray``); 120 s of CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ray import BEFORE, STEPS

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]

SCENARIOS = ("killed", "hanging", "runs", "standby", "refused")


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """What a driver script tells of all scenarios, in one Ray cluster."""
    # Ray's sockets are below it, and their names may have 107 characters.
    root = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "TMPDIR": str(root), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "tests.ray.driver", str(root), *SCENARIOS]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert [each.pid for each in psutil.process_iter() if str(root) in _command(each)] == []
        yield json.loads((root / "told.json").read_text())
    finally:
        shutil.rmtree(root)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def counted(told: dict[str, Any], pushes: int) -> None:
    """Every worker saw, and every shard counted, each push once."""
    assert [result["rank"] for result in told["results"]] == [0, 1]
    assert [result["counted"] for result in told["results"]] == [[pushes, pushes, pushes]] * 2
    assert set(told["versions"]) == {pushes}


def test_every_push_counts_once_when_a_worker_both_shards_and_the_coordinator_are_killed(told: dict[str, Any]) -> None:
    counted(told["killed"], 2 * STEPS + BEFORE)
    assert len(told["killed"]["versions"]) == 2


def test_every_push_counts_once_when_a_worker_stands_still(told: dict[str, Any]) -> None:
    counted(told["hanging"], 2 * STEPS + BEFORE)


def test_a_standby_takes_over_with_every_push(told: dict[str, Any]) -> None:
    counted(told["standby"], 2 * STEPS + BEFORE)


def test_a_second_run_continues_with_the_parameters_of_the_first(told: dict[str, Any]) -> None:
    first, second = told["runs"]["again"]["results"]
    counted({"results": first, "versions": [2 * STEPS]}, 2 * STEPS)
    counted({"results": second, "versions": told["runs"]["again"]["versions"]}, 4 * STEPS)


def test_a_lost_shard_without_a_folder_ends_the_run(told: dict[str, Any]) -> None:
    assert told["runs"]["no_folder"]["type"] == "StateLost"
    assert "shard 0 was lost" in told["runs"]["no_folder"]["message"]
    assert told["runs"]["no_more"]["type"] == "StateLost"


def test_a_lost_worker_ends_the_run_when_no_restart_is_left(told: dict[str, Any]) -> None:
    assert told["runs"]["no_restarts"]["type"] == "Unavailable"
    assert told["runs"]["no_restarts"]["message"] == "worker 1 was lost, and all 0 restarts of workers are used"


def test_what_the_function_raises_is_raised_in_the_driver(told: dict[str, Any]) -> None:
    is_the_users, _, notes = told["runs"]["wrong"]
    assert is_the_users
    assert notes == ["worker 1 raised it"]
    assert told["runs"]["wrong_role"][1] == "ConfigError"


def test_too_few_resources_are_an_error_that_says_what_there_is(told: dict[str, Any]) -> None:
    few, workers = told["refused"]["few"], told["refused"]["workers"]
    assert few["message"] == "Ray did not reserve resources for servers within 1 s: the cluster has too little CPU"
    assert few["expected"] == "SPREAD of 1 × CPU 0.5, 2 × CPU 400"
    assert few["actual"] == "1 node(s) with CPU 16 (16 free)"
    assert workers["message"].endswith("too little GPU")


def test_a_server_that_does_not_start_is_an_error_with_its_last_lines(told: dict[str, Any]) -> None:
    assert told["refused"]["wrong"]["message"] == "shard 0 exited with code 2"
    assert "Invalid value for '--threads'" in told["refused"]["wrong"]["actual"]


def test_calls_at_the_wrong_time_are_errors(told: dict[str, Any]) -> None:
    assert told["refused"]["lost"]["actual"] == "worker 0"
    assert told["refused"]["ended"]["message"] == "this RayCluster is not running"
    assert told["without_ray"]["remedy"] == "call ray.init() before RayCluster()"


def test_nothing_is_left_in_the_folder_for_temporary_files(told: dict[str, Any]) -> None:
    assert told["folders"] == []
