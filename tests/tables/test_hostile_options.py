"""Row optimizers never raise half-way: not with edge values that are admitted, nor with those of older logs."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.row_optimizers import LARGEST_OPTION, ROW_OPTIMIZERS
from ps_protocol.model.tables import RowInit, validate, validate_options
from ps_server.tables.step import RowStep
from tests.support.seeds import seeded
from tests.tables.samples import spec, table, use, values

EDGES = (0.0, 5e-324, 1e-38, 1e-8, 0.5, 1 - 1e-7, 1 - 2**-53, 1.0, 1e9, 1e38, 1e39, 1e308, -0.5, -10.0, -1e308)
NOT_NUMBERS = (float("nan"), float("inf"), -float("inf"), 10**400)


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_no_update_raises_whatever_the_options(name: str) -> None:
    chance = seeded()
    for _ in range(100):
        options = {key: chance.choice(EDGES) for key in ROW_OPTIMIZERS[name].defaults()}
        # Also those that an older version took, and has logged.
        options = {key: -abs(value) if key == "power" else abs(value) for key, value in options.items()}
        options |= {key: min(options[key], 1 - 2**-53) for key in ("beta1", "beta2") if key in options}
        held = table(spec(name))
        for number, size in enumerate((0.0, 1.0, 1e38), 1):
            print(options, size)
            held.apply(RowStep(0, np.arange(6), np.full((6, 4), size, np.float32), number, options))
        assert held.rows == 6


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam"])
def test_a_zero_gradient_without_eps_divides_as_numpy_does(name: str) -> None:
    held = table(spec(name, eps=0.0))
    validate(held.spec)
    use(held, [1, 2])
    assert np.isnan(values(held, [1, 2])).all()


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_learning_rate_of_zero_where_a_schedule_ends_leaves_values_as_they_are(name: str) -> None:
    held = table(spec(name, lr=0.1))
    use(held, [1, 2], np.ones((2, 4), np.float32))
    before = values(held, [1, 2])
    options = {**held.spec.options, "lr": 0.0}
    validate_options(held.spec, options)
    held.apply(RowStep(0, np.array([1, 2]), np.ones((2, 4), np.float32), 2, options))
    assert (values(held, [1, 2]) == before).all()
    use(held, [1, 2], np.ones((2, 4), np.float32))
    assert np.isfinite(values(held, [1, 2])).all()
    assert (values(held, [1, 2]) != before).all()


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *(("sgd", "lr", value) for value in (*NOT_NUMBERS, 1e308, -0.1, True, "0.1")),
        ("adam", "beta1", 1 - 2**-53),
        ("ftrl", "power", 0.5),
        ("ftrl", "power", -1e308),
        ("adagrad", "max_norm", 2 * LARGEST_OPTION),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_range(name: str, argument: str, value: float) -> None:
    declared = spec(name)
    with pytest.raises(UnsupportedOptimizer, match=f"are wrong: {argument}") as caught:
        validate_options(declared, {**declared.options, argument: value})
    assert f"{argument} (" in caught.value.expected


@pytest.mark.parametrize("init", [RowInit("uniform", -1e308, 1e308), RowInit("constant", float("nan"))])
def test_first_values_that_a_row_cannot_hold_are_refused(init: RowInit) -> None:
    with pytest.raises(InvalidRequest, match="init"):
        validate(spec(init=init))
