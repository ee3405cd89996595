"""Hugging Face's Trainer and Accelerate over a job: two workers in sync train as one process on the joined batch."""

from __future__ import annotations

import difflib
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli import forked
from tests.recovery.zygote import shared
from tests.support.interpreters import Interpreter

FOLDER = Path(__file__).parents[2] / "examples" / "huggingface"
CLOSE = {"rtol": 0, "atol": 1e-6}
SYNC = ("--no-progress", "--seed", "1", "--mode", "sync", "--shards", "2", "--workers", "2")


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries are in memory before processes are forked; nothing is asked of the hub."""
    shared().load("transformers", "accelerate", "transformers.models.bert.modeling_bert")


def job(folder: Path, script: str, *arguments: str, flags: tuple[str, ...] = SYNC) -> subprocess.CompletedProcess[str]:
    done = forked.run(folder, *flags, str(FOLDER / script), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def alone(folder: Path, script: str, *arguments: str) -> str:
    process = Interpreter(str(FOLDER / script), *arguments)
    try:
        found = process.stdout.read()
        assert process.wait() == 0, found
        return found
    finally:
        process.close()


@pytest.mark.parametrize(
    ("one", "many"),
    [("trainer_one_process.py", "trainer.py"), ("accelerate_one_process.py", "accelerate_loop.py")],
)
def test_a_script_for_a_job_differs_from_that_of_one_process_by_a_line_or_two(one: str, many: str) -> None:
    before, after = ((FOLDER / name).read_text().split('"""', 2)[2].splitlines() for name in (one, many))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert len(changed) <= 5, changed


def test_a_trainer_of_two_workers_ends_with_the_values_of_one_process_and_resumes(tmp_path: Path) -> None:
    ours, reference = tmp_path / "ours", tmp_path / "reference"
    options = ("--samples", "84", "--accumulate", "2")
    done = job(tmp_path, "trainer.py", *options, "--batch-size", "6", "--epochs", "2", "--output", str(ours))
    alone(
        tmp_path, "trainer_one_process.py", *options, "--batch-size", "12", "--epochs", "3", "--output", str(reference)
    )
    assert "Warning" not in done.stderr, done.stderr
    # 84 samples are 7 batches of 12: three steps of two, and one of one.
    names = sorted(path.name for path in ours.glob("checkpoint-*"))
    assert names == ["checkpoint-4", "checkpoint-8"]
    assert_same(ours, reference, "checkpoint-8")
    resumed = job(
        tmp_path, "trainer.py", *options, "--batch-size", "6", "--epochs", "3", "--resume", "--output", str(ours)
    )
    assert re.search(r"after 12 steps", resumed.stdout), resumed.stdout
    assert_same(ours, reference, "checkpoint-12")


def assert_same(ours: Path, reference: Path, checkpoint: str) -> None:
    """Parameters, moments and learning rate."""
    found, wanted = (load_file(folder / checkpoint / "model.safetensors") for folder in (ours, reference))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    mine, theirs = (torch.load(folder / checkpoint / "optimizer.pt") for folder in (ours, reference))
    assert mine["param_groups"][0]["lr"] == theirs["param_groups"][0]["lr"]
    for number, state in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number]["exp_avg"], state["exp_avg"], rtol=0, atol=1e-5)
        assert mine["state"][number]["step"] == state["step"]


def test_a_loop_of_accelerate_ends_with_the_values_of_one_process_and_resumes(tmp_path: Path) -> None:
    ours, reference = tmp_path / "ours", tmp_path / "reference"
    done = job(tmp_path, "accelerate_loop.py", "--epochs", "2", "--save", str(ours))
    resumed = job(
        tmp_path, "accelerate_loop.py", "--epochs", "1", "--load", str(ours), "--save", str(tmp_path / "resumed")
    )
    for each in (done, resumed):
        assert "Warning" not in each.stderr, each.stderr
    wanted = [
        alone(tmp_path, "accelerate_one_process.py", "--batch-size", "16", *options)
        for options in (
            ("--epochs", "2", "--save", str(reference)),
            ("--epochs", "3", "--save", str(tmp_path / "longer")),
        )
    ]
    found = [re.findall(r"64 sums, mean error ([\d.]+)", text) for text in (done.stdout, resumed.stdout, *wanted)]
    assert found[:2] == found[2:]
    assert all(len(each) == 1 for each in found)
    for folder, other in ((ours, reference), (tmp_path / "resumed", tmp_path / "longer")):
        torch.testing.assert_close(*(load_file(each / "model.safetensors") for each in (folder, other)), **CLOSE)
        mine, theirs = (torch.load(each / "optimizer.bin") for each in (folder, other))
        assert mine["param_groups"][0]["lr"] == theirs["param_groups"][0]["lr"]
        for number, state in theirs["state"].items():
            torch.testing.assert_close(mine["state"][number]["exp_avg"], state["exp_avg"], **CLOSE)


def test_a_step_of_adapters_moves_their_bytes_alone(tmp_path: Path) -> None:
    shared().load("peft", "transformers.models.gpt2.modeling_gpt2")
    done = job(tmp_path, "lora.py", "--steps", "4", "--output", str(tmp_path / "adapters"))
    found = re.search(r"a step moves (\d+) bytes: adapters (\d+), base (\d+)", done.stdout)
    assert found is not None, done.stdout
    moved, adapters, base = map(int, found.groups())
    # Gradients and parameters, and room between variables.
    assert 2 * adapters <= moved < 3 * adapters < base
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
