"""Momentum with several workers in async or ssp is warned of once, with the learning rate that is stable."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ps_protocol.model.spec import Consistency, Mode
from ps_worker.model.momentum import largest_stable_rate, slowdown, usual_delay
from ps_worker.on_shards import adopt_optimizer, declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.step.summary import StepSettings
from tests.support.shards import wait_until
from tests.worker.fakes import FakeSession
from tests.worker.jobs import running_job, together

ASYNC, SSP = Consistency(), Consistency(Mode.SSP, 4)
SGD, RMSPROP = torch.optim.SGD, torch.optim.RMSprop

#: The largest stable rate times curvature, from the roots of the recurrence.
KNOWN = {
    0.0: {0: 2, 1: 1, 2: 0.618, 3: 0.445, 7: 0.209, 15: 0.101, 31: 0.050},
    0.5: {0: 3, 1: 0.5, 2: 0.281, 3: 0.199, 7: 0.096, 15: 0.048, 31: 0.024},
    0.9: {0: 3.8, 1: 0.1, 2: 0.051, 3: 0.035, 7: 0.016, 15: 0.0079, 31: 0.0042},
}


@pytest.mark.parametrize("momentum", KNOWN)
def test_the_stable_rate_is_that_of_the_table(momentum: float) -> None:
    for delay, rate in KNOWN[momentum].items():
        assert largest_stable_rate(delay, momentum) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("delay", [0, 1, 2, 3, 9, 40])
def test_below_the_stable_rate_all_roots_lie_within_the_unit_circle_and_above_it_one_does_not(
    delay: int, momentum: float, nesterov: bool
) -> None:
    def radius(rate: float) -> float:
        terms = np.zeros(delay + 3)  # of w', w, w₋₁, …
        terms[:3] = 1.0, -(1 + momentum), momentum
        if nesterov:
            terms[delay + 1] += rate * (1 + momentum)
            terms[delay + 2] -= rate * momentum
        else:
            terms[delay + 1] += rate
        return float(max(abs(np.roots(terms))))

    rate = largest_stable_rate(delay, momentum, nesterov=nesterov)
    assert radius(0.99 * rate) < 1 < radius(1.01 * rate)


def test_four_workers_with_momentum_take_a_hundredth_of_the_rate_of_one() -> None:
    assert slowdown(usual_delay(4, ASYNC), 0.9) == pytest.approx(109, abs=0.5)
    assert slowdown(usual_delay(4, ASYNC), 0.9, nesterov=True) == pytest.approx(29, abs=0.5)
    assert slowdown(usual_delay(4, ASYNC), 0.0) == pytest.approx(4.5, abs=0.1)
    assert math.isfinite(slowdown(usual_delay(100_000, ASYNC), 0.999))


@pytest.mark.parametrize(
    ("consistency", "overlap", "delay"),
    [
        (ASYNC, False, 3),
        (ASYNC, True, 7),
        (SSP, False, 3),
        (SSP, True, 7),
        (Consistency(Mode.SSP, 0), True, 1.5),
        (Consistency(Mode.SYNC), True, 0),
        (Consistency(Mode.SYNC, backup=1), False, 0),
    ],
)
def test_how_old_gradients_are_follows_from_workers_mode_and_overlap(
    consistency: Consistency, overlap: bool, delay: float
) -> None:
    assert usual_delay(4, consistency, overlap=overlap) == delay


def test_in_lockstep_without_a_mean_the_rate_is_that_of_the_middle_of_a_round() -> None:
    """ssp(0): four gradients of the same values, one update after the other. The transfer of a round, exactly."""

    def radius(rate: float, momentum: float = 0.9) -> float:
        begin = np.eye(2)  # of w and m, each by w and m at the begin of the round
        w, m = begin
        for _ in range(4):
            m = momentum * m + begin[0]
            w = w - rate * m
        return float(max(abs(np.linalg.eigvals(np.array([w, m])))))

    rate = largest_stable_rate(usual_delay(4, Consistency(Mode.SSP, 0)), 0.9)
    assert radius(0.9 * rate) < 1 < radius(1.15 * rate)


# -- the warning


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def in_job(session: FakeSession, consistency: Consistency = ASYNC, workers: int = 4) -> None:
    session.consistency, session.workers = consistency, list(range(workers))
    session.view = replace(session.view, revision=session.view.revision + 1)


def declare(
    session: FakeSession,
    torch_class: type[torch.optim.Optimizer],
    model: Any = None,
    style: StepSettings | None = None,
    **arguments: Any,
) -> PsOptimizer:
    source = network() if model is None else model
    style = style or StepSettings()
    return declare_optimizer(session, torch_class, source, {"lr": 0.1} | arguments, name="net", style=style)[0]


def step(optimizer: PsOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "model.momentum"]


def test_the_warning_names_model_mode_workers_momentum_rate_and_remedy_once(
    session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    in_job(session)
    optimizer = declare(session, SGD, momentum=0.9)
    for _ in range(3):
        step(optimizer)
    in_job(session, SSP, workers=8)
    step(optimizer)
    assert warnings(caplog) == [
        "model 'net': in async with 4 workers the staleness of gradients is about 3, and the largest stable learning "
        "rate of SGD with momentum 0.9 is about 1/109 of that of one process; set momentum=0, or use Adam or sync "
        "(docs/learning.md)"
    ]
    assert caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("torch_class", "arguments", "consistency", "workers", "text"),
    [
        (SGD, {"momentum": 0.9, "nesterov": True}, SSP, 4, "ssp(4) with 4 workers"),
        (SGD, {"momentum": 0.9, "nesterov": True}, ASYNC, 4, "SGD with Nesterov's momentum 0.9 is about 1/29 of"),
        (RMSPROP, {"momentum": 0.9}, ASYNC, 2, "RMSprop with momentum 0.9 is about 1/38 of"),
        (SGD, {"momentum": 0.5}, ASYNC, 16, "momentum 0.5 is about 1/62 of"),
    ],
)
def test_optimizer_and_mode_have_a_number_of_their_own(
    session: FakeSession,
    caplog: pytest.LogCaptureFixture,
    torch_class: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    consistency: Consistency,
    workers: int,
    text: str,
) -> None:
    in_job(session, consistency, workers)
    declare(session, torch_class, **arguments)
    assert text in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("torch_class", "arguments", "consistency", "workers"),
    [
        (SGD, {"momentum": 0.9}, Consistency(Mode.SYNC), 4),
        (SGD, {"momentum": 0.9}, ASYNC, 1),
        (SGD, {}, ASYNC, 4),
        (RMSPROP, {}, ASYNC, 4),
        (torch.optim.Adam, {"betas": (0.9, 0.99)}, ASYNC, 4),
        (torch.optim.NAdam, {}, ASYNC, 4),
    ],
)
def test_nothing_is_said_in_sync_with_one_worker_or_without_momentum(
    session: FakeSession,
    caplog: pytest.LogCaptureFixture,
    torch_class: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    consistency: Consistency,
    workers: int,
) -> None:
    in_job(session, consistency, workers)
    step(declare(session, torch_class, **arguments))
    assert warnings(caplog) == []


def test_muon_which_makes_its_steps_equally_long_is_not_warned_of(
    session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    in_job(session)
    declare(session, torch.optim.Muon, [nn.Parameter(torch.ones(3, 2))], momentum=0.95)
    assert warnings(caplog) == []


def test_of_several_groups_the_one_with_the_smallest_rate_is_named(
    session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    in_job(session)
    first, second = (list(part.parameters()) for part in network())
    declare(session, SGD, [{"params": first, "momentum": 0.5}, {"params": second}], momentum=0.9)
    assert len(warnings(caplog)) == 1
    assert "momentum 0.9 is about 1/109" in warnings(caplog)[0]


def test_a_group_that_is_added_is_a_model_of_its_own(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    in_job(session)
    first, second = (list(part.parameters()) for part in network())
    optimizer = declare(session, SGD, first)
    assert warnings(caplog) == []
    session.shards = []
    optimizer.add_param_group({"params": second, "momentum": 0.9})
    assert ["'net+1'" in text for text in warnings(caplog)] == [True]


def test_an_adopted_optimizer_is_warned_of(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    in_job(session)
    model = network()
    adopt_optimizer(session, SGD(model.parameters(), lr=0.1, momentum=0.9), model, name="net")
    assert "momentum 0.9 is about 1/109" in warnings(caplog)[0]


def test_overlap_makes_the_gradients_of_one_worker_old_too(
    session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    in_job(session, workers=1)
    session.lookahead = 1
    declare(session, SGD, momentum=0.9, style=StepSettings(overlap=True))
    assert "in async with 1 worker and overlap the staleness of gradients is about 1," in warnings(caplog)[0]


@pytest.mark.parametrize(("before", "workers"), [(Consistency(Mode.SYNC), 4), (ASYNC, 1)])
def test_a_mode_that_is_changed_and_a_worker_that_joins_are_noticed(
    session: FakeSession, caplog: pytest.LogCaptureFixture, before: Consistency, workers: int
) -> None:
    in_job(session, before, workers)
    optimizer = declare(session, SGD, momentum=0.9)
    step(optimizer)
    assert warnings(caplog) == []
    in_job(session)
    step(optimizer)
    step(optimizer)
    assert len(warnings(caplog)) == 1


def test_momentum_that_a_scheduler_sets_is_noticed(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    in_job(session)
    optimizer = declare(session, SGD)
    step(optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    step(optimizer)
    assert "momentum 0.95" in warnings(caplog)[0]


def test_a_usual_filter_silences_it(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    def wanted(record: logging.LogRecord) -> bool:
        return getattr(record, "event", "") != "model.momentum"

    logging.getLogger("ps_worker").addFilter(wanted)
    try:
        in_job(session)
        declare(session, SGD, momentum=0.9)
    finally:
        logging.getLogger("ps_worker").removeFilter(wanted)
    assert warnings(caplog) == []


def test_one_of_the_workers_of_a_job_says_it_when_its_mode_changes(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(shards=2, workers=2, consistency=Consistency(Mode.SYNC)) as job:
        clusters = together(*[lambda rank=rank: job.cluster(rank=rank) for rank in range(2)])
        optimizers = together(
            *[lambda c=cluster: c.optimizer(SGD, network(), lr=0.1, momentum=0.9) for cluster in clusters]
        )
        together(*[lambda o=optimizer: step(o) for optimizer in optimizers])
        assert warnings(caplog) == []
        clusters[1].set_mode("async")
        wait_until(lambda: all(c._session.consistency == ASYNC for c in clusters))
        for _ in range(2):
            together(*[lambda o=optimizer: step(o) for optimizer in optimizers])
        assert ["in async with 2 workers" in text for text in warnings(caplog)] == [True]
