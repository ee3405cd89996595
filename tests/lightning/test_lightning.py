"""Lightning and Fabric with two workers against the same script in one process.

Costs 12 s of CPU time, 4 of them for the one import of Lightning, from which 20 processes are forked; at full length
twice that, for the oldest Lightning.
"""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_protocol.model.spec import Consistency, Mode
from tests.lightning.processes import LightningProcesses
from tests.support.length import choose, few, paired
from tests.worker.jobs import Job, running_job

OLDEST = "2.6.4"
"""Two versions before it were malicious uploads."""


@pytest.fixture(scope="module", params=choose(["installed", OLDEST], ["installed"]))
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightningProcesses]:
    """With the installed version of Lightning; at full length also with the oldest one that is supported."""
    folder = None if request.param == "installed" else tmp_path_factory.mktemp("lightning")
    if folder:
        install = ("install", "--quiet", "--no-deps", "--target", str(folder), f"lightning=={request.param}")
        if subprocess.run([sys.executable, "-m", "pip", *install], check=False, timeout=120).returncode:
            pytest.skip(f"pip cannot install lightning {request.param} here")
    started = LightningProcesses(folder)
    yield started
    started.close()


@pytest.fixture
def version(processes: LightningProcesses, request: pytest.FixtureRequest) -> str:
    """Of the Lightning that the test is to run with."""
    wanted = request.node.callspec.params["processes"]
    return importlib.metadata.version("lightning") if wanted == "installed" else wanted


def in_job(job: Job, rank: int) -> dict[str, str]:
    return {"PS_COORDINATOR": job.address, "PS_RANK": str(rank)}


def both(
    processes: LightningProcesses, folder: Path, scenario: str, mode: Mode = Mode.SYNC, **more: Any
) -> list[dict[str, Any]]:
    """Results of worker 0, worker 1, and the same script alone."""
    with running_job(workers=2, lease_seconds=60.0, consistency=Consistency(mode)) as job:
        shared = {"folder": folder / "job", "strategy": "torch_ps", "workers": 2, **more}
        alone = {"folder": folder / "alone", "strategy": "auto", "workers": 1, **more}
        results = processes.run(
            folder, (scenario, in_job(job, 0), shared), (scenario, in_job(job, 1), shared), (scenario, {}, alone)
        )
        assert [job.gone(rank) for rank in range(2)] == ["left", "left"]
        return results


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def warned(result: dict[str, Any]) -> set[str]:
    """Without the warning of Lightning that a checkpoint came from another folder, and without names of folders."""
    texts = {re.sub(r"/\S+/(job|alone)/", "", text) for text in result["warnings"]}
    return {text for text in texts if not text.startswith("The dirpath has changed")}


def assert_same_training(zero: dict[str, Any], one: dict[str, Any], alone: dict[str, Any]) -> None:
    for worker in (zero, one):
        assert_equal(worker["parameters"], alone["parameters"])
        assert worker["lr"] == alone["lr"]
        assert warned(worker) <= warned(alone)


def moments(checkpoint: dict[str, Any]) -> list[torch.Tensor]:
    state = checkpoint["optimizer_states"][0]["state"]
    return [state[number][name] for number in range(4) for name in ("exp_avg", "exp_avg_sq")]


def saved(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt"))


def test_a_module_trains_stops_saves_and_resumes_as_in_one_process(
    processes: LightningProcesses, version: str, tmp_path: Path
) -> None:
    zero, one, alone = both(processes, tmp_path, "fit")
    assert zero["lightning"] == one["lightning"] == version
    assert_same_training(zero, one, alone)
    assert alone["norm"] > 0.1, "nothing was clipped"
    assert (zero["rank"], one["rank"], zero["epochs"], one["epochs"]) == (0, 1, alone["epochs"], alone["epochs"])
    assert zero["steps"] == one["steps"] == alone["steps"]
    for ours, its in zip(zero["losses"], alone["losses"], strict=True):
        assert ours == pytest.approx(its, abs=1e-9)
    assert zero["losses"] == one["losses"]
    assert zero["best"] == one["best"]
    # The state is read from the shards where it is written, for each checkpoint once.
    assert zero["states"] > 0
    assert one["states"] == 0
    # One set of checkpoints, as one process writes it, with the state that is on the shards.
    assert saved(tmp_path / "job") == saved(tmp_path / "alone")
    ours, its = (torch.load(run["last"], weights_only=False) for run in (zero, alone))
    for name in ("epoch", "global_step", "lr_schedulers"):
        assert ours[name] == its[name]
    assert_equal(*(moments(each) for each in (ours, its)))
    again = both(processes, tmp_path / "again", "fit", resume=zero["last"])
    assert_same_training(*again)
    assert again[0]["epochs"] > zero["epochs"]


def test_a_module_is_saved_tested_and_fitted_again_as_in_one_process(
    processes: LightningProcesses, tmp_path: Path
) -> None:
    zero, one, alone = both(processes, tmp_path, "again")
    assert_same_training(zero, one, alone)
    assert zero["measured"] == one["measured"] == pytest.approx(alone["measured"], abs=1e-9)
    assert len(alone["losses"]) == 3 + 3 + 2
    for ours, its in zip(zero["losses"], alone["losses"], strict=True):
        assert ours == pytest.approx(its, abs=1e-9)
    # A checkpoint that is written after the fit has the state that is on the shards.
    assert_equal(*(moments(torch.load(tmp_path / run / "end.ckpt", weights_only=False)) for run in ("job", "alone")))


@pytest.mark.parametrize(
    ("kind", "mode"), few(paired(["ema", "lowest", "best", "swa", "swap"], [Mode.SYNC, Mode.ASYNC]), 3)
)
def test_weights_that_are_set_are_tested_predicted_with_and_fitted_on(
    processes: LightningProcesses, tmp_path: Path, kind: str, mode: Mode
) -> None:
    """An average that a callback sets at the end, the best weights that the script loads, on all ranks or on rank 0."""
    # Buffers of the ranks differ in training: they are compared without the same script alone.
    norm = kind in ("swa", "best", "lowest") and mode is Mode.ASYNC
    zero, one, alone = both(processes, tmp_path, "averages", mode, kind=kind, norm=norm)
    if zero["average"]:
        assert_equal(zero["set"], zero["average"])
    for worker in (zero, one):
        # Nothing comes back that was replaced, and no rank has something of its own.
        assert_equal(worker["tested"], zero["set"])
        assert_equal(worker["tested_buffers"], zero["tested_buffers"])
        assert worker["measured"] == zero["measured"]
    if mode is Mode.SYNC and kind != "lowest":
        for worker in (zero, one):
            assert_equal(worker["tested"], alone["tested"])
            assert_equal(worker["parameters"], alone["parameters"])
            assert worker["measured"] == pytest.approx(alone["measured"], abs=1e-9)


def test_manual_optimization_of_two_optimizers_with_plateau_schedulers(
    processes: LightningProcesses, tmp_path: Path
) -> None:
    zero, one, alone = both(processes, tmp_path, "manual")
    assert_same_training(zero, one, alone)
    assert zero["lr"] != [0.1, 0.01]
    assert zero["last"] == one["last"] == pytest.approx(alone["last"], abs=1e-9)


def test_a_fabric_loop_saves_and_loads_as_in_one_process(processes: LightningProcesses, tmp_path: Path) -> None:
    zero, one, alone = both(processes, tmp_path, "loop")
    assert_same_training(zero, one, alone)
    assert zero["losses"] == one["losses"] == pytest.approx(alone["losses"], abs=1e-9)
    assert (zero["epoch"], one["epoch"]) == (1, 1)
    assert one["told"] == {"rank": 0}
    assert one["gathered"] == [1.0, 1.0]
    assert saved(tmp_path / "job") == ["saved.ckpt"]


def test_single_calls_are_answered_and_refused(processes: LightningProcesses, tmp_path: Path) -> None:
    with running_job(workers=2, lease_seconds=60.0) as job:
        calls = [("fabric_calls", in_job(job, rank), {"folder": tmp_path / "job"}) for rank in range(2)]
        evaluator = ("as_evaluator", {**in_job(job, 0), "PS_ROLE": "evaluator"}, {"folder": tmp_path})
        zero, one, _ = processes.run(tmp_path, *calls, evaluator)
        assert (zero["rank"], one["rank"]) == (0, 1)


def test_several_trainers_of_a_process_share_its_connection(processes: LightningProcesses, tmp_path: Path) -> None:
    with running_job(workers=2, lease_seconds=60.0, consistency=Consistency(Mode.SYNC)) as job:
        calls = [("trainer_calls", in_job(job, rank), {"folder": tmp_path / "job"}) for rank in range(2)]
        zero, one = processes.run(tmp_path, *calls)
        # The last run of a trainer failed, and the script went on to its end.
        assert [job.gone(rank) for rank in range(2)] == ["left: ValueError: planned"] * 2
    assert zero["batches"] == one["batches"] == [12, 6]
    assert zero["validated"] == one["validated"]
    assert zero["finite"]
    # Twice all rows of files, and those of the validation after a check of two batches.
    assert sorted(zero["trained"] + one["trained"]) == sorted([*range(700)] * 2)
    assert {*zero["evaluated"], *one["evaluated"]} == {*range(700, 900)}
    assert sorted(zero["split"] + one["split"]) == [*range(700)]
    # Three batches, of which Lightning keeps the positions.
    assert zero["predicted"] + one["predicted"] == 3
