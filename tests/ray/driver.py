"""A driver script: jobs in a Ray cluster of this machine, one after the other. Prints what they did as JSON.

``python -m tests.ray.driver FOLDER SCENARIO…``; FOLDER is empty, and short: sockets of Ray are below it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

import ps_worker
from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.model_status import shard_maps, statuses_of
from ps_protocol.errors import PsError
from ps_worker.ray import RayCluster
from tests.ray import BEFORE, STEPS

LIMIT_SECONDS = 300.0


def killer(kill: Callable[[], None]) -> threading.Thread:
    """A thread that kills."""
    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def end(told: threading.ExceptHookArgs) -> None:
    """A thread that cannot kill ends the script, which would wait."""
    traceback.print_exception(told.exc_value)
    os._exit(1)


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Each push adds 1 to every parameter. Worker 1 stops after some, once, until somebody kills it."""
    folder = Path(config["folder"])
    with ps_worker.connect(connect_timeout_seconds=LIMIT_SECONDS, reconnect_timeout_seconds=LIMIT_SECONDS) as cluster:
        ones = torch.nn.Parameter(torch.zeros(1000))
        optimizer = cluster.optimizer(torch.optim.SGD, [ones], lr=1.0)
        first = not (folder / "reached").exists()
        for step in range(STEPS):
            if step == BEFORE and cluster.rank == 1 and first:
                (folder / "reached").touch()
                if config.get("hangs"):
                    # Not one of its threads runs: its lease ends, and its process lives.
                    os.kill(os.getpid(), signal.SIGSTOP)
                signal.pause()
            ones.grad = torch.full_like(ones, -1.0)
            optimizer.step()
        # No barrier: that does not wait for a worker that was lost.
        while optimizer.version < config["pushes"]:
            time.sleep(0.05)
            optimizer.pull()
        counted = [ones.min().item(), ones.max().item(), optimizer.version]
        return {"rank": cluster.rank, "counted": counted, "pid": os.getpid()}


def versions(address: str) -> list[int]:
    """How many pushes each shard has applied."""
    with CoordinatorClient(address) as client:
        view = client.get_status().view
        return [status.version for status in statuses_of(client, shard_maps(client, view), view)["model"]]


def server_pid(address: str, shard: int) -> int:
    with CoordinatorClient(address) as client:
        return next(each.pid for each in client.get_status().members if str(each.member) == f"shard {shard}")


def standby_lag(address: str) -> int | None:
    with CoordinatorClient(address) as client:
        return next(each.stats.standby_lag for each in client.get_status().members if str(each.member) == "shard 0")


def servers() -> list[str]:
    """Programs of ps_server that this script's Ray cluster has started, and that live."""
    children = psutil.Process().children(recursive=True)
    found = []
    for child in children:
        try:
            found += [" ".join(child.cmdline()[3:5])] * ("ps_server" in " ".join(child.cmdline()))
        except psutil.Error:
            continue
    return found


def killed(folder: Path) -> dict[str, Any]:
    """A worker, the coordinator, a shard's actor and the process of another shard are killed in a running job."""
    with RayCluster(2, 2, data_dir=folder / "state", start_timeout_seconds=LIMIT_SECONDS) as cluster:

        def kill() -> None:
            wait_until((folder / "reached").exists)
            os.kill(server_pid(cluster.address, 1), signal.SIGKILL)
            for role in ("worker", "shard", "coordinator"):
                ray.kill(cluster.actor(role, int(role == "worker")))

        killing = killer(kill)
        results = cluster.run(train, {"folder": str(folder), "pushes": 2 * STEPS + BEFORE})
        killing.join()
        return {"results": results, "versions": versions(cluster.address)}


def hanging(folder: Path) -> dict[str, Any]:
    """A worker stands still in a running job: the coordinator loses it, and asks this driver for another one."""
    times.JOINING_SECONDS = 5.0
    options = ("--lease-seconds", "5")
    with RayCluster(1, 2, coordinator_options=options, start_timeout_seconds=LIMIT_SECONDS) as cluster:
        results = cluster.run(train, {"folder": str(folder), "pushes": 2 * STEPS + BEFORE, "hangs": True})
        return {"results": results, "versions": versions(cluster.address)}


def standby(folder: Path) -> dict[str, Any]:
    """The disk of a shard is lost with it: its standby takes over."""
    with RayCluster(
        1,
        2,
        data_dir=folder / "state",
        standbys=True,
        server_restarts=1,
        shard_options=("--acknowledge", "after"),
        start_timeout_seconds=LIMIT_SECONDS,
    ) as cluster:

        def kill() -> None:
            wait_until((folder / "reached").exists)
            wait_until(lambda: standby_lag(cluster.address) == 0)
            shutil.rmtree(folder / "state" / "shard-0")
            ray.kill(cluster.actor("shard", 0))
            ray.kill(cluster.actor("worker", 1))

        killing = killer(kill)
        results = cluster.run(train, {"folder": str(folder), "pushes": 2 * STEPS + BEFORE})
        killing.join()
        return {"results": results, "versions": versions(cluster.address)}


def runs(folder: Path) -> dict[str, Any]:
    """Runs in one cluster without a folder, one after the other. Two are whole, each of the others ends early."""
    reached, told = folder / "reached", {}

    def wrong() -> None:
        with ps_worker.connect() as cluster:
            if cluster.rank == 1:
                raise ZeroDivisionError("of the user")
            cluster.barrier()
            signal.pause()

    def wrong_role() -> None:
        ps_worker.connect(role="chief")

    def kill(role: str, index: int) -> threading.Thread:
        reached.unlink()

        def run() -> None:
            wait_until(reached.exists)
            ray.kill(cluster.actor(role, index))

        return killer(run)

    with RayCluster(1, 2, worker_restarts=0, start_timeout_seconds=LIMIT_SECONDS) as cluster:
        reached.touch()
        both = [cluster.run(train, {"folder": str(folder), "pushes": pushes}) for pushes in (2 * STEPS, 4 * STEPS)]
        told["again"] = {"results": both, "versions": versions(cluster.address)}
        for function in (wrong, wrong_role):
            try:
                cluster.run(function)
            except (ZeroDivisionError, PsError) as error:
                told[function.__name__] = [isinstance(error, ZeroDivisionError), type(error).__name__, error.__notes__]
        kill("worker", 1)
        told["no_restarts"] = error_of(lambda: cluster.run(train, {"folder": str(folder), "pushes": math.inf}))
        kill("shard", 0)
        told["no_folder"] = error_of(lambda: cluster.run(train, {"folder": str(folder), "pushes": math.inf}))
        told["no_more"] = error_of(lambda: cluster.run(train, {"folder": str(folder), "pushes": math.inf}))
    return told


def refused(folder: Path) -> dict[str, Any]:
    """More than the Ray cluster has; an option that the shard does not take; no Ray cluster."""

    def enter(**settings: Any) -> Callable[[], object]:
        return lambda: RayCluster(**settings).__enter__()

    few = error_of(enter(shards=2, shard_resources={"CPU": 400}, start_timeout_seconds=1.0))
    wrong = error_of(enter(shard_options=("--threads", "-1"), start_timeout_seconds=LIMIT_SECONDS))
    with RayCluster(start_timeout_seconds=LIMIT_SECONDS, worker_resources={"GPU": 1}) as cluster:
        cluster._timeout_seconds = 1.0
        workers = error_of(lambda: cluster.run(train, {}))
        lost = error_of(lambda: cluster.actor("worker", 0))
    return {"few": few, "wrong": wrong, "workers": workers, "lost": lost, "ended": error_of(cluster.check)}


def error_of(call: Callable[[], object]) -> dict[str, Any]:
    try:
        call()
    except PsError as error:
        return {"type": type(error).__name__, **vars(error)}
    raise AssertionError("nothing was raised")


def main() -> None:
    root = Path(sys.argv[1])
    threading.excepthook = end
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=str(root / "r"),
    )
    told: dict[str, Any] = {}
    for scenario in sys.argv[2:]:
        folder = root / scenario
        folder.mkdir()
        told[scenario] = globals()[scenario](folder)
        wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
        wait_until(lambda: not servers())
    ray.shutdown()
    told["folders"] = [path.name for path in root.glob("torch-ps-*") if "-shm-" not in path.name]
    told["without_ray"] = error_of(lambda: RayCluster().__enter__())
    (root / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
