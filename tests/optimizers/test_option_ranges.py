"""No argument that is admitted makes a step raise, whatever gradients hold; torch's own defaults are admitted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ps_protocol.errors import UnsupportedOptimizer
from ps_protocol.model.optimizers import ELEMENTWISE, EXECUTION_HINTS, SHAPED
from ps_protocol.model.option_ranges import RANGES, out_of_range, require_in_range
from ps_protocol.model.spec import DType, Option
from ps_server.coordinator.placement.declaration import check_model
from ps_server.optimizers import catalog
from ps_server.state.region import Region
from tests.optimizers.models import Shard, case_id, fill, spec_of, whole_layout
from tests.support.seeds import drawn_seed

NAMES = sorted(name.rpartition(".")[2] for name in ELEMENTWISE | SHAPED)
DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
#: Edges of ranges, of dtypes and of double precision, beside usual values.
NUMBERS = (0.0, -0.0, 5e-324, 1e-300, 1e-45, 1e-12, 1e-8, 0.5, 0.9, 0.99, 1 - 1e-7, 1 - 1e-9, 1 - 2**-53, 1.0)
NUMBERS += (1 + 2**-52, 1.2, 5.0, 50.0, 6e4, 65505.0, 1e6, 1e9, 1e18, 1e38, 4e38, 1e154, 1e308, -1e-300, -0.8, -1.0)
NUMBERS += (-1e9, -1e308, float("inf"), float("nan"), 10**400)
OTHERS: tuple[Option, ...] = (True, False, None, "0.1", [], [0.5], [0.5, 0.5, 0.5], 3, 99, 100)


def _hostile(chance: random.Random, value: Option) -> Option:
    """Something to stand where ``value`` stood, mostly of its kind."""
    if isinstance(value, list) and chance.random() < 0.9:
        return [_hostile(chance, each) if chance.random() < 0.7 else each for each in value]
    if chance.random() < 0.1:
        return chance.choice(OTHERS)
    return chance.random() < 0.5 if isinstance(value, bool) else chance.choice(NUMBERS)


def _defaults(name: str) -> dict[str, Any]:
    cls = getattr(torch.optim, name)
    known = cls([torch.zeros(1, 1)]).defaults
    ours = {key: value for key, value in known.items() if key not in EXECUTION_HINTS | {"differentiable"}}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in ours.items()}


def _admitted(name: str, dtype: DType, options: dict[str, Any]) -> bool:
    spec = spec_of(name, (dtype,), [options])
    try:
        require_in_range(spec, spec.group_options)
        catalog.validate(spec)
    except UnsupportedOptimizer:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_admitted_and_every_argument_has_a_range(name: str) -> None:
    defaults = _defaults(name)
    assert defaults.keys() <= RANGES[f"torch.optim.{name}"].keys()
    for dtype in DTYPES:
        assert _admitted(name, dtype, defaults)
        assert _admitted(name, dtype, {**defaults, "lr": 0.0}), "where a schedule ends"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("name", NAMES)
def test_no_step_raises_with_arguments_that_are_admitted(name: str, dtype: DType) -> None:
    seed = drawn_seed()
    chance, defaults, steps = random.Random(seed), _defaults(name), 0
    while steps < 12:
        changed = chance.sample(sorted(defaults), chance.randint(1, min(4, len(defaults))))
        options = {**defaults, **{key: _hostile(chance, defaults[key]) for key in changed}}
        if not _admitted(name, dtype, options):
            continue
        shard = Shard.of(whole_layout(spec_of(name, (dtype,), [options])))
        gradients = Region(shard.region.layout)
        fill(shard.region, torch.Generator().manual_seed(seed))
        for scale in (0.0, 1.0, 1e38):
            fill(gradients, torch.Generator().manual_seed(seed))
            gradients.arena(0).mul_(scale)
            print(options, scale)
            shard.optimizer.apply(gradients)
            steps += 1


TRIGGERS: tuple[tuple[str, dict[str, Option]], ...] = (
    ("RMSprop", {"alpha": 1e308}),
    ("ASGD", {"alpha": 1e308}),
    ("NAdam", {"lr": 1e308}),
    ("NAdam", {"betas": [1 - 1e-9, 0.999]}),
    ("Rprop", {"etas": [0.5, 1e308]}),
    ("Muon", {"ns_steps": 100}),
    ("Muon", {"ns_steps": 5.5}),
    ("SGD", {"lr": float("nan")}),
    ("SGD", {"maximize": "yes"}),
    ("Adam", {"lr": 10**400}),
    ("Adafactor", {"eps": [None, None]}),
)


def test_a_number_whose_square_is_too_large_for_float16_is_refused() -> None:
    check_model(spec_of("Adafactor", (DType.FLOAT32,), [{"lr": 0.1, "eps": [6e4, 1e-3]}]))
    with pytest.raises(UnsupportedOptimizer, match="'eps'"):
        check_model(spec_of("Adafactor", (DType.FLOAT16,), [{"lr": 0.1, "eps": [6e4, 1e-3]}]))


@pytest.mark.parametrize(("name", "options"), TRIGGERS, ids=case_id)
def test_a_value_out_of_range_is_refused_where_a_model_is_declared(name: str, options: dict[str, Option]) -> None:
    fine = spec_of(name, (DType.FLOAT32,), [{"lr": 0.1}, {"lr": 0.1}])
    check_model(fine)
    with pytest.raises(UnsupportedOptimizer, match="in group 1") as caught:
        check_model(replace(fine, group_options=({"lr": 0.1}, {"lr": 0.1, **options})))
    error, argument = caught.value, next(iter(options))
    assert f"'{argument}'" in error.message
    assert error.expected
    assert error.remedy
    assert error.actual == repr(options[argument])[:80]


def test_the_range_of_a_float16_group_is_its_own() -> None:
    spec = spec_of("SGD", (DType.FLOAT32, DType.FLOAT16), [{"lr": 1e5}, {"lr": 0.1}])
    require_in_range(spec, spec.group_options)
    with pytest.raises(UnsupportedOptimizer, match="group 1") as caught:
        require_in_range(spec, ({"lr": 0.1}, {"lr": 1e5}))
    assert "60000 for float16" in caught.value.expected


def test_an_optimizer_without_ranges_is_left_to_who_knows_it() -> None:
    assert list(out_of_range("torch.optim.LBFGS", {"lr": -1.0}, half=False)) == []
