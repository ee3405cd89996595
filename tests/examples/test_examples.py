"""The examples through ps-run, to a level they reach soon: each in one mode, at full length in every mode."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli import forked
from tests.recovery.zygote import shared
from tests.support.length import choose, paired

EXAMPLES = Path(__file__).parents[2] / "examples"

MODES = {
    "sync": ("--mode", "sync"),
    "async": ("--mode", "async"),
    "ssp": ("--mode", "ssp", "--staleness", "4"),
}

SETTINGS = {
    "digits.py": ("--epochs", choose("8", "5"), "--expect-accuracy", choose("0.95", "0.93")),
    "gan_digits.py": ("--epochs", choose("14", "8"), "--lr", "0.002", "--expect-distance", choose("0.3", "0.4")),
    "char_lm.py": ("--epochs", "1", "--stride", choose("128", "512"), "--expect-loss", choose("4.0", "5.0")),
}


def ps_run(folder: Path, *arguments: str, own_interpreters: bool = False) -> subprocess.CompletedProcess[str]:
    """A job in ``folder``. ``own_interpreters``: its processes import everything themselves."""
    job = ("--no-progress", "--seed", "1", *arguments)
    if not own_interpreters:
        shared().load("sklearn.datasets")
        return forked.run(folder, *job)
    command = [sys.executable, "-m", "ps_server.cli.launcher.main", *job]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("example", "mode"), paired(list(SETTINGS), list(MODES)))
def test_an_example_reaches_its_level_in_every_mode(tmp_path, example, mode):
    job = ("--shards", "2", "--workers", "2", *MODES[mode], str(EXAMPLES / example), *SETTINGS[example])
    done = ps_run(tmp_path, *job, own_interpreters=choose(mode == "sync", False))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(expected at" in done.stdout


def test_an_example_that_misses_its_level_fails_the_job(tmp_path):
    done = ps_run(tmp_path, str(EXAMPLES / "digits.py"), "--epochs", "0")
    assert done.returncode == 1
    assert "worker 0 exited with code 1" in done.stderr


def test_an_evaluator_follows_the_training_and_the_saved_model_is_the_one_that_was_measured(tmp_path):
    saved = tmp_path / "digits.pt"
    script = (str(EXAMPLES / "digits.py"), "--epochs", "3", "--expect-accuracy", "0.8", "--save", str(saved))
    done = ps_run(tmp_path, "--workers", "2", "--evaluators", "1", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    followed = re.findall(r"evaluator 0 \| step (\d+): test accuracy ([\d.]+)", done.stdout)
    steps = [int(step) for step, _ in followed]
    assert steps == sorted(set(steps))
    measured = re.search(r"\| test accuracy ([\d.]+)", done.stdout)
    assert measured is not None
    assert followed[-1][1] == measured[1]
    digits = load_example("digits")
    model = digits.network()
    model.load_state_dict(torch.load(saved))
    assert f"{digits.accuracy(model, digits.datasets()[1], torch.device('cpu')):.4f}" == measured[1]


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
