"""The laboratory of ``python -m benchmarks.learning``: exact delays, the same bits for a seed, equality with torch."""

import json
import math
from dataclasses import replace
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.learning import __main__ as program
from benchmarks.learning import grid, studies
from benchmarks.learning.grid import Kept, Row, Run, make, run_all
from benchmarks.learning.laboratory import Outcome, Setting, train
from benchmarks.learning.rules import RULES, Pushed, Share
from benchmarks.learning.stability import measured
from benchmarks.learning.tasks import TASKS, Characters, Clicks, Digits, NoisyQuadratic, Task
from ps_protocol.errors import ConfigError
from ps_protocol.launch.rehearsal import speeds_of
from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_worker.model.momentum import largest_stable_rate
from tests.support.length import few

ASYNC, SYNC = Consistency(), Consistency(Mode.SYNC)


def setting(consistency: Consistency, workers: int = 4, pushes: int = 64, **options: Any) -> Setting:
    return Setting("SGD", {"lr": 0.05} | options, consistency, workers, pushes)


def outcome_of(task: Task, chosen: Setting, speeds: str = "equal", seed: int = 0) -> Outcome:
    return train(task, chosen, speeds_of(speeds, chosen.workers, seed), seed)


@pytest.mark.parametrize("consistency", [ASYNC, SYNC, Consistency(Mode.SSP, 1)], ids=str)
def test_a_training_repeats_bit_for_bit(consistency):
    chosen = setting(consistency, momentum=0.9)
    first, second = (outcome_of(NoisyQuadratic(), chosen, "exponential", seed=3) for _ in range(2))
    assert first == second
    assert first != outcome_of(NoisyQuadratic(), chosen, "exponential", seed=4)


def test_in_sync_it_is_one_process_on_the_joined_batch():
    task, workers, rounds = Digits(), 3, 4
    found = outcome_of(task, setting(SYNC, workers, rounds * workers, momentum=0.9))
    model = task.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generators = [torch.Generator().manual_seed(rank) for rank in range(workers)]
    for _ in range(rounds):
        optimizer.zero_grad()
        losses = [task.loss(model, rank, workers, generators[rank]) for rank in range(workers)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert found.curve[-1][2] == pytest.approx(task.measure(model), rel=1e-6)
    assert found.seconds == rounds


def test_gradients_of_equal_workers_are_as_old_as_there_are_other_workers():
    found = outcome_of(NoisyQuadratic(), setting(ASYNC, 4, 64, lr=0.01))
    assert found.staleness == {0: 1, 1: 1, 2: 1, 3: 61}
    assert found.seconds == 16.0
    assert found.mean_staleness == pytest.approx(186 / 64)


def test_a_slow_worker_holds_sync_and_ssp_and_not_async():
    seconds = {
        mode: outcome_of(NoisyQuadratic(), setting(program.consistency_of(mode), 4, 256), "slow:8").seconds
        for mode in ("async", "ssp:2", "sync")
    }
    assert seconds["async"] < seconds["ssp:2"] < seconds["sync"] == 8 * 64


def test_what_is_too_old_is_dropped_or_makes_a_smaller_step():
    rejecting = replace(ASYNC, stale_policy=StalePolicy.REJECT, stale_threshold=2)
    dropped = outcome_of(NoisyQuadratic(), setting(rejecting))
    assert dropped.dropped > 0
    assert max(dropped.staleness) <= 2
    scaling = replace(ASYNC, stale_policy=StalePolicy.SCALE)
    plain, scaled = (outcome_of(NoisyQuadratic(noise=0), setting(each)) for each in (ASYNC, scaling))
    assert plain.measure < scaled.measure < plain.curve[0][2]


@pytest.mark.long
def test_the_optimizer_of_shards_is_stable_as_far_as_theory_says():
    for nesterov in (False, True):
        theory = largest_stable_rate(1, 0.9, nesterov=nesterov)
        assert measured(1, 0.9, nesterov=nesterov, pushes=1000) == pytest.approx(theory, rel=0.03)


def test_momentum_that_one_process_takes_diverges_with_four_workers_and_a_small_rate_does_not():
    assert not outcome_of(NoisyQuadratic(), setting(SYNC, 4, 800, lr=0.3, momentum=0.9)).diverged
    found = outcome_of(NoisyQuadratic(), setting(ASYNC, 4, 800, lr=0.3, momentum=0.9))
    assert found.diverged
    assert found.measure == float("inf")
    assert not outcome_of(NoisyQuadratic(), setting(ASYNC, 4, 800, lr=0.02, momentum=0.9)).diverged


def test_speeds_are_as_described(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text("# pre-empted twice\n1 2 30\n1 2 0.5\n")
    assert [speeds_of(f"trace:{trace}", 2, 0)(1, step) for step in (1, 2, 3)] == [1.0, 31.5, 1.0]
    assert [speeds_of("1,0.25", 4, 0)(rank, 1) for rank in range(4)] == [1.0, 4.0, 1.0, 4.0]
    assert [speeds_of("slow:4", 3, 0)(rank, 9) for rank in range(3)] == [1.0, 1.0, 4.0]
    chance = speeds_of("exponential", 2, 1)
    means = [sum(chance(rank, step) for step in range(1000)) / 1000 for rank in range(2)]
    assert means == pytest.approx([1.0, 1.0], rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "fast", "slow:", "slow:-1", "slow:inf", "1,2", "1,0", "1,nan", "trace:nowhere", "trace:wrong"]
)
def test_speeds_that_are_none_are_refused(text, tmp_path):
    (tmp_path / "wrong").write_text("0 1 1\n7 1 1\n")
    with pytest.raises(ConfigError):
        speeds_of(text.replace("trace:", f"trace:{tmp_path}/"), 3, 0)


@pytest.mark.parametrize("text", ["", "sync:x", "async:1", "ssp", "async+older:1", "sync+scale:1", "ssp:1+scale:x"])
def test_a_mode_that_is_none_is_refused(text):
    with pytest.raises(click.BadParameter, match="is none of"):
        program.consistency_of(text)


def test_the_program_prints_a_table_and_writes_everything(tmp_path):
    path, plot = tmp_path / "all.json", tmp_path / "all.png"
    words = ["--task", "quadratic", "--lr", "0.02", "--lr", "30", "--mode", "async", "--pushes", "40", "--seeds", "2"]
    arguments = ["run", *words, "--processes", "1", "--json", str(path), "--plot", str(plot)]
    done = CliRunner().invoke(program.main, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["options"] for row in rows] == [{"lr": 0.02}, {"lr": 30}]
    assert [[outcome["diverged"] for outcome in row["outcomes"]] for row in rows] == [[False] * 2, [True] * 2]
    assert "2 of 2" in done.output
    assert plot.stat().st_size > 1000
    refused = CliRunner().invoke(program.main, ["run", "--optimizer", "LBFGS", "--seeds", "1", "--processes", "1"])
    assert refused.exit_code == 1
    assert "cannot run on shards" in refused.output


def test_the_time_to_a_measure_is_the_median_over_seeds():
    curves = [[(0.0, 0, 2.0), (1.0, 4, 1.0), (2.0, 8, 0.5)], [(0.0, 0, 2.0), (5.0, 4, 0.5)], [(0.0, 0, 2.0)]]
    row = Row("digits", setting(ASYNC), "equal", [Outcome(0.5, 0.5, False, 1.0, {}, 0, curve) for curve in curves])
    assert row.seconds_to(0.5) == 5.0
    assert row.seconds_to(0.1) is None
    assert row.spread == 0.0


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"plain", "dana"}))
def test_no_rule_changes_a_gradient_that_is_not_old(rule):
    chosen = setting(ASYNC, 1, momentum=0.9)
    plain, ruled = (outcome_of(NoisyQuadratic(), each, "exponential") for each in (chosen, replace(chosen, rule=rule)))
    assert ruled == plain


def test_momentum_by_worker_is_that_of_nesterov_with_one_worker():
    chosen = setting(ASYNC, 1, momentum=0.9)
    found = outcome_of(NoisyQuadratic(), replace(chosen, rule="dana"))
    task = NoisyQuadratic()
    model, generator = task.model(0), torch.Generator().manual_seed(0)
    (w,) = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(chosen.pushes):  # w here is where the momentum leads, which the worker pulls
        optimizer.zero_grad()
        task.loss(model, 0, 1, generator).backward()
        optimizer.step()
    with torch.no_grad():
        w.add_(optimizer.state[w]["momentum_buffer"], alpha=0.05 * 0.9)
    assert found.measure == pytest.approx(task.measure(model), rel=1e-4)


class Taken:
    """Each rule in NumPy: what one push changes the parameters by, less the learning rate. By the papers' letters."""

    def __init__(self, rule: str, workers: int, lr: float, momentum: float) -> None:
        self.rule, self.workers, self.lr, self.momentum = rule, workers, lr, momentum
        self.v = np.zeros(64)
        self.vs = np.zeros((workers, 64))
        self.mean_square, self.steps, self.seconds = None, [], {}

    def step(self, g, w, w_read, rank, tau, seconds):
        n = self.workers
        match self.rule:
            case "dana":
                self.vs[rank] = self.momentum * self.vs[rank] + g
                return self.vs[rank]
            case "threshold" if tau >= n:
                return None
            case "gap" if self.steps and tau:
                weights = 0.99 ** np.arange(len(self.steps))[::-1]
                c = np.sqrt(np.average(np.square(self.steps), axis=0, weights=weights))
                penalty = 1 + np.abs(w - w_read) / c
            case "compensation":
                before = g**2 if self.mean_square is None else self.mean_square
                self.mean_square = 0.95 * before + 0.05 * g**2
                g = g + 2 / np.sqrt(self.mean_square + 1e-7) * g * g * (w - w_read)
        factor = {"concurrency": min(1, n / max(1, tau)), "inverse": 1 / max(1, tau)}.get(self.rule, 1)
        if self.rule == "share":
            known = self.seconds.get(rank, seconds)
            self.seconds[rank] = 0.9 * known + 0.1 * seconds
            factor = self.seconds[rank] * np.mean([1 / each for each in self.seconds.values()])
        penalty = locals().get("penalty", 1.0)
        self.v = self.momentum * self.v + g / penalty
        self.steps.append(self.lr * self.v * penalty)
        return factor * self.v

    def read(self, w):
        return w - self.lr * self.momentum * self.vs.sum(axis=0)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("seed", few([3, 8]))
def test_each_rule_is_its_formula_on_random_delays(rule, seed):
    print(f"seed {seed}")
    workers, pushes, lr, momentum = 5, 100, 0.02, 0.3
    chosen = replace(setting(ASYNC, workers, pushes, lr=lr, momentum=momentum), rule=rule)
    speeds = speeds_of("exponential", workers, seed)
    found = train(NoisyQuadratic(), chosen, speeds, seed)
    h, w, taken = np.logspace(-2, 0, 64), np.ones(64), Taken(rule, workers, lr, momentum)
    noise = [torch.Generator().manual_seed(seed * 1009 + rank) for rank in range(workers)]
    read, version, steps = [w] * workers, [0] * workers, [0] * workers
    began, now = [0.0] * workers, 0.0
    for made in range(pushes):
        ends = [began[rank] + speeds(rank, steps[rank] + 1) for rank in range(workers)]
        rank = int(np.argmin(ends))
        now = ends[rank]
        g = h * read[rank] + 0.1 * torch.randn(64, generator=noise[rank]).numpy()
        change = taken.step(g, w, read[rank], rank, made - version[rank], now - began[rank])
        w = w if change is None else w - lr * change
        read[rank], version[rank], began[rank] = taken.read(w), made + 1, now
        steps[rank] += 1
    assert max(found.staleness) > workers
    assert found.measure == pytest.approx((h * w**2).sum() / 2, rel=1e-3)


def pushed(staleness: int = 3, rank: int = 0, seconds: float = 1.0) -> Pushed:
    generator = torch.Generator().manual_seed(staleness)
    return Pushed(rank, staleness, seconds, *torch.randn(3, 8, generator=generator))


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        ("threshold", [1, 1, 1, 1, 0, 0]),
        ("concurrency", [1, 1, 1, 1, 1, 4 / 5]),
        ("inverse", [1, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
    ],
)
def test_steps_are_smaller_by_staleness(rule, factors):
    made = RULES[rule](4, {"lr": 0.1})
    assert [made.take(pushed(staleness)) for staleness in range(6)] == pytest.approx(factors)


def test_steps_by_share_make_each_worker_count_alike():
    rule = Share(2, {"lr": 0.1})
    # Worker 0 makes three steps of 1 s while worker 1 makes one of 3 s.
    for _ in range(5):
        first = [rule.take(pushed(rank=0, seconds=1.0)) for _ in range(3)]
        second = rule.take(pushed(rank=1, seconds=3.0))
    assert sum(first) == pytest.approx(second)
    assert sum(first) + second == pytest.approx(4)


def test_a_momentum_for_each_worker_is_stable_where_one_on_the_shard_diverges():
    chosen = setting(ASYNC, 8, 800, lr=0.05)
    momentum = replace(chosen, options={"lr": 0.02, "momentum": 0.9})
    assert outcome_of(NoisyQuadratic(), momentum).diverged
    assert not outcome_of(NoisyQuadratic(), replace(momentum, rule="dana")).diverged


def test_a_rule_that_does_not_fit_the_optimizer_is_refused():
    for arguments in ([], ["--arg", "momentum=0.9", "--arg", "nesterov=true"], ["--optimizer", "Adam"]):
        result = CliRunner().invoke(program.main, ["run", "--task", "quadratic", "--rule", "dana", *arguments])
        assert result.exit_code == 2
        assert "SGD with momentum above 0" in result.output


def test_the_learning_rate_rises_and_falls_with_the_pushes():
    rates = replace(setting(ASYNC, pushes=100), warmup=0.1, decay=True)
    assert [rates.rate_at(done) for done in (0, 9, 10, 55, 99)] == pytest.approx([1 / 11, 10 / 11, 1, 0.5, 1 / 90])
    assert {setting(ASYNC).rate_at(done) for done in range(64)} == {1.0}
    plain = setting(ASYNC, pushes=200)
    noisy, settled = (outcome_of(NoisyQuadratic(1.0), replace(plain, decay=decay)).measure for decay in (False, True))
    assert settled < noisy


@pytest.mark.parametrize("task", [Characters(), Clicks()], ids=["characters", "clicks"])
def test_transformer_and_factorization_machine_learn(task):
    adam = Setting("Adam", {"lr": 0.01}, ASYNC, 2, 100, measures=1)
    found = outcome_of(task, adam)
    assert found.curve[-1][2] < 0.9 * found.curve[0][2]
    assert found.score == pytest.approx(found.measure) or 0.5 < found.score < 1


def test_every_task_says_what_its_score_is():
    for made in TASKS.values():
        task = made()
        assert task.larger_is_better == (task.score_name in ("AUC", "accuracy, %"))


def test_the_best_rate_of_each_rule_is_shown(capsys):
    rates = ["--lr", "0.05", "--lr", "50"]
    arguments = ["run", "--task", "quadratic", "--mode", "async", "--seeds", "1", "--pushes", "40", "--processes", "1"]
    result = CliRunner().invoke(program.main, [*arguments, *rates, "--rule", "plain", "--rule", "gap"])
    assert result.exit_code == 0, result.output
    assert "largest lr without divergence" in result.output
    assert result.output.count("gap") >= 3


@pytest.mark.long
def test_rules_come_in_this_order_on_the_quadratic():
    quadratic = {
        (rule, rate): make(Run("quadratic", replace(setting(ASYNC, 8, 1500, lr=rate), rule=rule), "equal", 0)).measure
        for rate in (0.4, 0.05)
        for rule in ("plain", "threshold", "concurrency", "inverse", "gap", "compensation")
    }
    # Seven updates old: twice the largest stable rate of 0.209. Steps by staleness and by gap are smaller.
    assert {rule for (rule, rate), value in quadratic.items() if rate == 0.4 and value == math.inf} == {
        *("plain", "threshold", "concurrency")
    }
    assert quadratic["inverse", 0.4] < quadratic["gap", 0.4] < quadratic["compensation", 0.4]
    # At a rate that is stable, what makes steps smaller is slower.
    assert quadratic["plain", 0.05] < quadratic["gap", 0.05] < quadratic["inverse", 0.05]


@pytest.mark.parametrize("optimizer", few(studies.OPTIMIZERS))
def test_no_recommended_setting_diverges_on_digits_with_four_workers(optimizer):
    rate = max(studies.OPTIMIZERS[optimizer].rates)
    name, options = studies.in_async(optimizer, rate, 4)
    chosen = Setting(name, options, ASYNC, 4, 400, 4, warmup=0.05, decay=True)
    found = make(Run("digits", chosen, "exponential", 0))
    assert found.measure < 0.5 * found.curve[0][2]


def made_up(stable: float = math.inf, spread: float = 0.0) -> studies.Train:
    """Trainings that diverge where rate times workers is larger than ``stable``."""

    def train(trainings):
        rows = []
        for task, chosen, speeds in trainings:
            whole = chosen.options["lr"] * chosen.workers <= stable
            ends = [(1 + spread * seed if whole else math.inf) for seed in range(2)]
            outcomes = [Outcome(end, end, not whole, 8.0, {}, 0, [(0.0, 0, 3.0), (4.0, 8, end)]) for end in ends]
            rows.append(Row(task, chosen, speeds, outcomes))
        return rows

    return train


@pytest.mark.parametrize("stable", [math.inf, 0.01, 0.0])
@pytest.mark.parametrize("name", studies.STUDIES)
def test_each_study_prints_tables(name, stable):
    for table in studies.STUDIES[name](made_up(stable)).split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
        assert "nan" not in table


def test_the_largest_stable_rate_is_found_by_bisection():
    (row,) = (line for line in studies.stable(made_up(0.5)).splitlines() if line.startswith("| SGD |"))
    _, one, *parts = (cell.strip() for cell in row.strip("|").split("|"))
    assert float(one) == pytest.approx(0.5, rel=0.1)
    assert [int(part.removeprefix("1/")) for part in parts] == pytest.approx([4, 16, 4, 20], rel=0.1)


@pytest.mark.parametrize(
    ("gain", "verdict"), [(0.3, "wins: +30.0 %"), (0.1, "alike: +10.0 %"), (-0.3, "lost: -30.0 %")]
)
def test_a_rule_wins_by_more_than_the_spread(gain, verdict):
    base, row = (
        Row("digits", setting(ASYNC), "equal", [Outcome(end, 0, False, 1, {}, 0) for end in (mean - 0.1, mean + 0.1)])
        for mean in (1.0, 1.0 - gain)
    )
    assert studies.verdict(row, base) == verdict
    assert studies.verdict(None, base) == "lost"
    assert studies.verdict(base, base) == ""


def test_outcomes_that_are_kept_are_not_made_again(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    fine, wild = (Run("quadratic", setting(ASYNC, pushes=40, lr=rate), "equal", 0) for rate in (0.02, 30.0))
    first = run_all([fine, wild, fine], 1, lambda done, all_: None, Kept(path))
    assert [len(row.outcomes) for row in first] == [2, 1]
    monkeypatch.setattr(grid, "make", lambda run: pytest.fail(f"{run} is made again"))
    assert run_all([fine, wild, fine], 1, lambda done, all_: None, Kept(path)) == first
    path.write_text("{}\n")
    with pytest.raises(click.BadParameter, match="is not a file of outcomes"):
        Kept(path)


def test_a_study_is_a_command(monkeypatch, tmp_path):
    study = program._study("one", lambda train: str(len(train([("quadratic", setting(ASYNC, pushes=8), "equal")]))))
    kept = tmp_path / "kept"
    result = CliRunner().invoke(study, ["--seeds", "2", "--processes", "1", "--kept", str(kept)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "1"
    assert len(kept.read_text().splitlines()) == 2
