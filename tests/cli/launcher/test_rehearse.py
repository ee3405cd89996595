"""ps-run rehearse: virtual workers of a user's own script, on a virtual clock, over the servers of a job. 40 CPU
seconds."""

from __future__ import annotations

import json
import math
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ps_protocol.errors import NotReady
from ps_protocol.launch.rehearsal import RehearsalNews, RehearsalPlan
from ps_protocol.model.spec import Consistency
from ps_server.cli.launcher.main import main
from ps_server.cli.launcher.rehearse import Rehearsals, Rehearsed, show
from ps_worker.rehearsal import turns
from tests.cli import forked
from tests.recovery.zygote import shared
from tests.support.length import choose, few
from tests.worker.data.files.made import parquet

EXAMPLES = Path(__file__).parents[3] / "examples"

TRAINING = """
import random
import numpy, torch, ps_worker
torch.manual_seed(0)
STEPS = 6
with ps_worker.connect() as cluster:
    model = torch.nn.Linear(4, 1)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.05)
    for step in range(STEPS):
        x = torch.randn(8, 4) * (1 + random.random()) + numpy.random.rand()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cluster.report(loss=loss)
        {after_step}
    {at_end}
"""


def training(after_step: str = "pass", at_end: str = "pass", steps: int = 6) -> str:
    return TRAINING.format(after_step=after_step, at_end=at_end).replace("STEPS = 6", f"STEPS = {steps}")


class Done:
    """What a rehearsal printed and wrote."""

    def __init__(self, done: subprocess.CompletedProcess[str], path: Path) -> None:
        self.code = done.returncode
        self.text = done.stdout + done.stderr
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"modes": []}
        self.modes = {each["mode"]: each for each in found["modes"]}


def run(folder: Path, *arguments: str) -> Done:
    path = folder / "found.json"
    return Done(forked.run(folder, "rehearse", "--json", str(path), *arguments), path)


def rehearse(folder: Path, script: str, *flags: str) -> Done:
    (folder / "train.py").write_text(script)
    return run(folder, "--workers", "3", *flags, "train.py")


def test_the_example_is_rehearsed_as_it_is(tmp_path):
    shared().load("sklearn.datasets")
    done = run(tmp_path, "--workers", "4", "--steps", "8", "--mode", "async", str(EXAMPLES / "digits.py"))
    assert done.code == 0, done.text
    assert done.modes["async"]["last"] < 2.2
    assert done.modes["async"]["verdict"] == ""


def test_a_rate_and_momentum_that_learn_in_sync_do_not_in_async(tmp_path):
    shared().load("sklearn.datasets")
    script = (EXAMPLES / "digits.py").read_text().replace("AdamW, model", "SGD, model, momentum=0.9")
    (tmp_path / "digits.py").write_text(script)
    job = ("--workers", "4", "--steps", "12", "--mode", "sync", "--mode", "async")
    done = run(tmp_path, *job, "digits.py", "--lr", "0.05")
    assert done.code == 0, done.text
    sync, asynchronous = done.modes["sync"], done.modes["async"]
    assert sync["last"] < 0.6
    assert asynchronous["last"] > 2.0
    assert asynchronous["verdict"].startswith("rose to")
    assert [sync["steps"], sync["seconds"], sync["staleness"]] == [48, 12.0, {"0": 48}]
    # Each gradient is as old as there are other workers.
    assert asynchronous["staleness"] == {"0": 1, "1": 1, "2": 1, "3": 45}
    assert "loss until second" in done.text


def test_a_rehearsal_in_sync_ends_with_the_bits_of_a_job_and_each_rehearsal_with_those_of_another(tmp_path):
    script = training(at_end="cluster.barrier(); print('at the end', cluster.rank, model.weight.flatten().tolist())")
    script = script.replace("random.random()", "cluster.rank").replace("numpy.random.rand()", "1.0")
    modes = ("--mode", "sync", "--mode", "async", "--speeds", "exponential", "--threads", "1")
    first, second = (rehearse(tmp_path, script, *modes) for _ in range(2))
    assert first.modes == second.modes
    job = forked.run(tmp_path, "--no-progress", "--mode", "sync", "--workers", "3", "train.py")
    (weights,) = {line.partition("at the end 0 ")[2] for line in job.stdout.splitlines() if "at the end 0" in line}
    assert f"sync | worker 0 | at the end 0 {weights}" in first.text, job.stderr


def test_workers_of_a_script_that_push_together_per_host_are_rehearsed_each_by_itself(tmp_path):
    script = training().replace("connect()", "connect(per_host=True)")
    done = rehearse(tmp_path, script, "--mode", "async")
    assert done.code == 0, done.text
    assert done.modes["async"]["staleness"] == {"0": 1, "1": 1, "2": 16}


def test_with_overlap_a_worker_ends_with_the_bits_of_a_job(tmp_path):
    script = training(at_end="optimizer.finish(); print('at the end', model.weight.flatten().tolist())")
    script = script.replace("lr=0.05", "lr=0.01, overlap=True")
    script = script.replace("random.random()", "cluster.rank").replace("numpy.random.rand()", "1.0")
    (tmp_path / "train.py").write_text(script)
    alone = run(tmp_path, "--workers", "1", "--mode", "async", "--threads", "1", "train.py")
    job = forked.run(tmp_path, "--no-progress", "--mode", "async", "train.py")
    (end,) = [line.partition(" | ")[2] for line in job.stdout.splitlines() if "at the end" in line]
    assert f"async | worker 0 | {end}" in alone.text, job.stderr
    several = rehearse(tmp_path, script, "--mode", "async", "--mode", "ssp", "--speeds", "1,1,0.1")
    assert [found["steps"] for found in several.modes.values()] == [18, 18], several.text


def test_a_slow_worker_is_waited_for_as_the_mode_has_it(tmp_path):
    done = rehearse(tmp_path, training(steps=8), "--speeds", "1,1,0.25", "--staleness", "2")
    assert done.code == 0, done.text
    last = {
        mode: [[at for at, _ in found["reports"]].count(32.0), max(map(int, found["staleness"]))]
        for mode, found in done.modes.items()
    }
    # In sync all end with the slow one. In ssp the others end two steps before it, in async after their own 8 seconds.
    assert last == {"sync": [3, 0], "ssp(2)": [1, 6], "async": [1, 8]}
    assert [at for at, _ in done.modes["ssp(2)"]["reports"]].count(24.0) == 3
    assert [at for at, _ in done.modes["async"]["reports"]].count(8.0) == 3


def test_each_worker_has_random_numbers_modules_and_arguments_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text("import torch\nmodel = torch.nn.Linear(4, 1)\ncalls = []\n")
    script = training("own.calls.append(step)", "print(cluster.rank, len(own.calls), sys.argv[1:])")
    script = script.replace("import random", "import random, sys").replace("STEPS = 6", "import own\nSTEPS = 6")
    script = script.replace("torch.nn.Linear(4, 1)", "own.model")
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, "--workers", "2", "--mode", "async", "--all-output", "-m", "train", "--name", "x")
    assert done.code == 0, done.text
    for rank in range(2):
        assert f"async | worker {rank} | {rank} 6 ['--name', 'x']" in done.text


LEASED = """
import torch, ps_worker
from torch.utils.data import DataLoader, TensorDataset
with ps_worker.connect() as cluster:
    data = TensorDataset(torch.arange(96, dtype=torch.float32).reshape(96, 1))
    loader = cluster.shard(DataLoader(data, batch_size=4, shuffle=True, num_workers=2), lease=True)
    model = torch.nn.Linear(1, 1)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.0001)
    seen = []
    for epoch in range(2):
        for (x,) in loader:
            seen += x.flatten().int().tolist()
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cluster.report(loss=loss)
    found = cluster.gather_values(seen)
    if cluster.rank == 0:
        items = sorted(sum(found.values(), []))
        print("items", [len(each) for each in found.values()], items == sorted([*range(96)] * 2))
"""


def test_leased_data_goes_to_the_workers_that_are_fast(tmp_path):
    done = rehearse(tmp_path, LEASED, "--speeds", "1,1,0.5")
    assert done.code == 0, done.text
    again = rehearse(tmp_path, LEASED, "--speeds", "1,1,0.5", "--mode", "async")
    assert again.modes["async"] == done.modes["async"]
    assert "async | worker 0 | items [80, 72, 40] True" in done.text
    assert "sync | worker 0 | items [64, 64, 64] True" in done.text
    assert done.modes["async"]["seconds"] < done.modes["ssp(4)"]["seconds"] < done.modes["sync"]["seconds"]
    assert "async: a DataLoader loads its data in the script itself" in done.text


EARLY = "if cluster.rank == 1 and step == 2: break"
TABLE = training().replace("torch.nn.Linear(4, 1)", "torch.nn.ModuleList([torch.nn.Linear(4, 1), table])")
TABLE = TABLE.replace(
    "    model =", "    table = cluster.embedding(4, name='r', optimizer=ps_worker.rows.SGD(lr=1.0))\n    model ="
)
TABLE = TABLE.replace("model(x)", "model[0](x + table(torch.arange(step, step + 8)))")
SECOND = "second = cluster.optimizer(torch.optim.SGD, other := torch.nn.Linear(4, 1), lr=0.1)"
STEP_SECOND = "second.zero_grad(); other(x).square().mean().backward(); second.step()"

WHOLE = {
    "collective calls": training("assert sorted(cluster.gather_values(step)) == [0, 1, 2]; cluster.all_reduce(loss)"),
    "barriers": training("cluster.barrier()"),
    "a worker that ends early": training(EARLY),
    "a worker that is early at the barrier": training(EARLY, "cluster.barrier()"),
    "a worker that is early in a collective call": training(EARLY, "cluster.gather_values(step)"),
    "values that are set first": training().replace("    for step", "    model.weight.data.mul_(0.5)\n    for step"),
    "values that are set last": training(at_end="model.weight.data.mul_(0.5)"),
    "two models": training(STEP_SECOND).replace("    for step", f"    {SECOND}\n    for step"),
    "a model that is released": training(at_end="optimizer.close(release=True)"),
    "a table": TABLE,
    "an import of trainers": "import sys; sys.modules.setdefault('ps_worker.huggingface', sys)\n" + training(),
    "no with": training().replace("with ps_worker.connect() as cluster:", "cluster = ps_worker.connect()\nif True:"),
}


@pytest.mark.parametrize("mode", few(["sync", "ssp", "async"]))
@pytest.mark.parametrize(
    "name", choose(list(WHOLE), ["a worker that is early in a collective call", "an import of trainers"])
)
def test_a_script_ends_with(tmp_path, name, mode):
    done = rehearse(tmp_path, WHOLE[name], "--mode", mode, "--speeds", "1,0.5,1")
    assert done.code == 0, done.text
    (found,) = done.modes.values()
    assert found["steps"] == {"two models": 36}.get(name, 15 if "early" in name else 18)


SHORT = {
    'if cluster.rank == 1 and step == 2: raise KeyError("lost")': "worker 1, step 4: KeyError: 'lost'",
    "import time; time.sleep(0.1)": "worker 0, step 2: ConfigError: a rehearsal cannot run a script that sleeps",
    "import os; os.fork()": "a rehearsal cannot run a script that starts processes of its own",
    "import multiprocessing as m; m.Process(target=print).start()": "a script that starts processes of its own",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)": "cannot run a script that handles signals",
    "import threading; threading.Thread(target=optimizer.step).start()": "steps in another thread than its own",
    "cluster.set_mode('sync')": "worker 0, step 2: ConfigError: a rehearsal sets the mode itself",
    "import sys; sys.exit(3 if cluster.rank == 2 else 0)": "worker 2 ended after 1 step: exit code 3",
    "ps_worker.connect()": "a rehearsal connects once",
    "ps_worker.strategy('one_device')": "a script that calls strategy()",
}


@pytest.mark.parametrize("after_step", choose(list(SHORT), list(SHORT)[:2]))
def test_a_script_that_fails_names_worker_and_step_and_one_that_cannot_be_rehearsed_why(tmp_path, after_step):
    done = rehearse(tmp_path, training(after_step), "--mode", "async")
    assert done.code == 1
    assert SHORT[after_step] in done.text
    assert done.modes["async"]["verdict"] == "failed"
    if "KeyError" in after_step:
        assert 'train.py", line 16, in <module>' in done.text


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("print('hello')", "worker 0, step 1: ConfigError: the script has ended without connect()"),
        ("def", "SyntaxError: invalid syntax (train.py, line 1)"),
        (
            training().replace("connect()", "connect('other:7000')"),
            "the script names others in connect(); actual: other",
        ),
        (training().replace("connect()", "connect(role='evaluator')"), "a rehearsal has workers alone"),
        (
            f"exec({training()!r}, {{'__name__': 'ps_worker.lightning.process'}})",
            "a rehearsal cannot run what ps_worker.lightning trains",
        ),
    ][:: choose(1, 4)],
)
def test_a_script_that_is_none_of_a_job_is_refused(tmp_path, script, why):
    done = rehearse(tmp_path, script, "--mode", "sync")
    assert done.code == 1
    assert why in done.text


def test_workers_that_wait_for_each_other_are_named_with_what_they_wait_for(tmp_path):
    # Not earlier: a machine that is busy may let all wait for longer than that while they train.
    at_end = "turns.GRACE_SECONDS = 0.2; cluster.barrier() if cluster.rank else cluster.gather_values(1)"
    script = f"from ps_worker.rehearsal import turns\n{training(at_end=at_end)}"
    done = rehearse(tmp_path, script, "--mode", "sync")
    assert done.code == 1
    assert (
        "worker 0: waiting in the exchange 'default', number 0 for worker 1, 2; worker 1: waiting at the" in done.text
    )


def test_a_gradient_that_is_not_finite_is_a_divergence(tmp_path):
    done = rehearse(tmp_path, training(steps=30).replace("lr=0.05", "lr=1e9"), "--mode", "async")
    assert done.code == 0, done.text
    assert done.modes["async"]["verdict"] == "diverged"
    assert "NonFiniteGradient" in done.text


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--speeds", "1,1,0.25"], "'1,1,0.25' has 3 speeds for 4 workers"),
        (["--speeds", "fast"], "a speed is a number above 0"),
        (["--staleness", "2", "--mode", "sync"], "--staleness has no effect in mode sync"),
        (["--backup", "1", "--grace-seconds", "1"], "--grace-seconds counts real time"),
        (["--nothing"], "No such option"),
        (["--json", "/proc/nowhere.json"], "--json: /proc/nowhere.json cannot be written"),
        (["--mode", "later"], "'later' is not one of"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_begins(flags, why):
    done = CliRunner().invoke(main, ["rehearse", *flags, str(EXAMPLES / "digits.py")])
    assert done.exit_code == 2
    assert why in done.output


def test_a_script_that_is_not_there_is_refused():
    done = CliRunner().invoke(main, ["rehearse", "nowhere.py"])
    assert done.exit_code == 2
    assert "no such script: 'nowhere.py'" in done.output


def test_what_the_processes_tell_each_other_comes_as_it_was():
    plan = RehearsalPlan("a.py", ("--x", "1"), False, 2, "equal", {"mode": "sync"}, 0, None, "loss", 1)
    assert RehearsalPlan.from_json(plan.to_json()) == plan
    news = RehearsalNews(3, 1.5, True, [(1.0, 2.0)], ["loss"], {0: 2, 3: 1}, "no", "trace", True, ["note"])
    assert RehearsalNews.from_json(news.to_json()) == news


def rehearsed(*values: float, **news: Any) -> Rehearsed:
    reports = [(float(at), value) for at, value in enumerate(values, 1)]
    return Rehearsed(Consistency(), RehearsalNews(finished=True, reports=reports, **news))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (rehearsed(2.0, 1.0, 0.5), ""),
        (rehearsed(2.0, 9.0, 0.5), "rose to 9"),
        (rehearsed(2.0, 41.0), "diverged"),
        (rehearsed(2.0, math.nan), "diverged"),
        (rehearsed(2.0, not_finite=True, failure="worker 0, step 3: NonFiniteGradient"), "diverged"),
        (rehearsed(2.0, failure="worker 0, step 3: KeyError"), "failed"),
        (rehearsed(), ""),
        (Rehearsed(Consistency()), "not finished"),
    ],
)
def test_the_verdict_on_a_metric(found, verdict):
    assert found.verdict == verdict
    assert found.failed == (verdict == "failed")


def test_a_script_that_reports_nothing_gets_a_hint(capsys):
    show([rehearsed(metrics=["accuracy"], staleness={0: 90, 1: 9, 7: 1})], "loss")
    text = capsys.readouterr().out
    assert "call cluster.report(loss=…) after each step, or give --metric; it reports accuracy" in text
    assert "0.16" in text


def test_turns_are_given_by_virtual_time_and_then_by_rank():
    order: list[tuple[int, float]] = []
    found = turns.Turns(3, None)

    def work(place: turns.Place) -> None:
        place.wait_until(0.0, "its first turn")
        for _ in range(2):
            place.wait_until(place.seconds + (1.0 if place.rank else 2.0), "its step")
            order.append((place.rank, place.seconds))
        place.end()

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in found.places]
    for thread in threads:
        thread.start()
    found.run()
    assert order == [(1, 1.0), (2, 1.0), (0, 2.0), (1, 2.0), (2, 2.0), (0, 4.0)]
    assert found.now == 4.0


def test_workers_that_all_wait_are_an_error(monkeypatch):
    monkeypatch.setattr(turns, "GRACE_SECONDS", 0.02)
    found = turns.Turns(2, None)

    def work(place: turns.Place) -> None:
        while True:
            place.ask_later("its friend")

    for place in found.places:
        threading.Thread(target=work, args=(place,), daemon=True).start()
    with pytest.raises(NotReady, match="worker 0: its friend; worker 1: its friend"):
        found.run()


def test_ctrl_c_shows_what_is_known_and_ends_with_its_exit_code(monkeypatch):
    def interrupted(self: Rehearsals) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rehearsals, "run", interrupted)
    done = CliRunner().invoke(main, ["rehearse", "--mode", "ssp", str(EXAMPLES / "digits.py")])
    assert done.exit_code == 130
    assert "not finished" in done.output


def test_a_process_that_is_killed_is_a_failure(monkeypatch):
    monkeypatch.setattr("ps_server.cli.launcher.rehearse.MODULE", "this")
    done = CliRunner().invoke(main, ["rehearse", "--mode", "ssp", str(EXAMPLES / "digits.py")])
    assert done.exit_code == 1
    assert "ssp(4): the process of the rehearsal ended with exit code 0" in done.output


FILES = """
import torch, ps_worker
from ps_worker import files
with ps_worker.connect() as cluster:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=0.001)
    batches = cluster.files("*.parquet", {"id": files.ids("id"), "x": files.floats("x")}, batch_size=16)
    for epoch in range(2):
        for batch in batches:
            parameter.grad = torch.tensor([float(len(batch["id"]))])
            optimizer.step()
            cluster.report(loss=batch["x"].mean())
    cluster.barrier()
    print("counted", round(-parameter.item() * 1000))
"""


@pytest.mark.parametrize("mode", few(["async", "sync"]))
def test_a_script_that_reads_files_is_rehearsed(tmp_path, mode):
    parquet(tmp_path / "a.parquet", range(700), group=300)
    done = rehearse(tmp_path, FILES, "--mode", mode)
    assert done.code == 0, done.text
    if mode == "async":
        assert "counted 1400" in done.text
