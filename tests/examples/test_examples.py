"""Every example under every mode through ps-run, once as a user starts it, with settings that reach a level soon."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launcher import forked

EXAMPLES = Path(__file__).parents[2] / "examples"

MODES = {
    "async": ("--mode", "async"),
    "ssp": ("--mode", "ssp", "--staleness", "4"),
    "sync": ("--mode", "sync"),
}

SETTINGS = {
    "digits.py": ("--epochs", "8", "--expect-accuracy", "0.97"),
    "gan_digits.py": ("--epochs", "14", "--lr", "0.002", "--expect-distance", "0.3"),
    "char_lm.py": ("--epochs", "1", "--stride", "128", "--expect-loss", "4.0"),
}


def ps_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ps_server.launcher.main", "--no-progress", "--seed", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("example", SETTINGS)
def test_an_example_reaches_its_level_in_every_mode(tmp_path, example, mode):
    job = ("--shards", "2", "--workers", "2", *MODES[mode], str(EXAMPLES / example), *SETTINGS[example])
    # Once for each example in interpreters of their own, which import everything themselves.
    done = ps_run(*job) if mode == "sync" else forked.run(tmp_path, "--no-progress", "--seed", "1", *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(expected at" in done.stdout


def test_an_example_that_misses_its_level_fails_the_job():
    done = ps_run(str(EXAMPLES / "digits.py"), "--epochs", "0")
    assert done.returncode == 1
    assert "worker 0 exited with code 1" in done.stderr


def test_an_evaluator_follows_the_training_and_the_saved_model_is_the_one_that_was_measured(tmp_path):
    saved = tmp_path / "digits.pt"
    script = (str(EXAMPLES / "digits.py"), "--epochs", "5", "--expect-accuracy", "0.9", "--save", str(saved))
    done = ps_run("--workers", "2", "--evaluators", "1", *script)
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
