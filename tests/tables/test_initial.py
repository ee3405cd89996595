"""What a row begins with depends on seed, table, id and column, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS, RowOptimizer, State
from ps_protocol.model.tables import RowInit
from ps_server.tables.initial import first_state
from tests.tables.samples import random_ids, spec, table, use, values


def test_an_id_without_a_row_has_the_values_its_row_will_begin_with() -> None:
    held = table(spec("adagrad"))
    ids = random_ids(np.random.default_rng(1), 100)
    before = values(held, ids)
    assert held.rows == 0
    use(held, ids)
    assert held.rows == 100
    assert values(held, ids).tobytes() == before.tobytes()


@pytest.mark.parametrize("init", [RowInit("uniform", -1, 1), RowInit("normal", 0, 1)])
def test_values_do_not_depend_on_the_other_ids_asked_for_nor_on_buckets_or_optimizer(init: RowInit) -> None:
    ids = random_ids(np.random.default_rng(2), 200)
    expected = values(table(spec(init=init)), ids)
    order = np.random.default_rng(3).permutation(ids.size)
    for optimizer in ROW_OPTIMIZERS:
        other = table(spec(optimizer, init=init, buckets=64))
        use(other, range(10**12, 10**12 + 300))
        assert values(other, ids[order]).tobytes() == expected[order].tobytes()
    wider = values(table(spec(init=init, dim=9)), ids)
    assert wider[:, :4].tobytes() == expected.tobytes()


@pytest.mark.parametrize("init", [RowInit("uniform", -1, 1), RowInit("normal", 0, 1)])
def test_seed_table_id_and_column_each_make_a_difference(init: RowInit) -> None:
    ids = np.arange(100)
    one = values(table(spec(init=init)), ids)
    assert np.unique(one).size > 0.999 * one.size
    assert not (one == values(table(spec(init=init, seed=2)), ids)).any()
    assert not (one == values(table(spec(init=init, name="users")), ids)).any()


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        ("sgd", {}, []),
        ("adagrad", {"initial": 0.5}, [0.5] * 4),
        ("rowwise_adagrad", {"initial": 0.5}, [0.5]),
        ("adam", {}, [0.0] * 8),
        ("ftrl", {"initial": 0.5}, [0.5] * 4 + [0.0] * 4),
    ],
)
def test_the_state_of_a_new_row_is_as_its_optimizer_declares_it(
    optimizer: str, options: dict[str, float], expected: list[float]
) -> None:
    declared = spec(optimizer, dim=4, **options)
    assert (first_state(declared).tolist(), declared.state_width) == (expected, len(expected))


def test_a_row_optimizer_without_a_declared_state_cannot_be_defined() -> None:
    with pytest.raises(TypeError, match="state"):
        type("Forgetful", (RowOptimizer,), {}, kind="forgetful")
    with pytest.raises(TypeError, match="first"):
        State()  # type: ignore[call-arg]
    assert "forgetful" not in ROW_OPTIMIZERS


def test_uniform_values_fill_their_range_evenly() -> None:
    drawn = values(table(spec(init=RowInit("uniform", -0.5, 1.5), dim=16)), np.arange(20_000))
    assert -0.5 <= drawn.min() < -0.499
    assert 1.499 < drawn.max() < 1.5
    counts = np.histogram(drawn, 50, (-0.5, 1.5))[0]
    assert abs(counts / drawn.size - 0.02).max() < 0.001
    assert abs(np.corrcoef(drawn.T) - np.eye(16)).max() < 0.04


def test_normal_values_have_the_mean_the_deviation_and_the_tails_of_a_normal_distribution() -> None:
    drawn = values(table(spec(init=RowInit("normal", 2.0, 0.5), dim=16)), np.arange(20_000)).astype(np.float64)
    standard = (drawn - 2.0) / 0.5
    assert abs(standard.mean()) < 0.005
    assert abs(standard.std() - 1) < 0.005
    for limit, inside in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((abs(standard) < limit).mean() - inside) < 0.002
    assert abs((standard**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(drawn.T) - np.eye(16)).max() < 0.04


def test_constant_values_are_constant() -> None:
    assert (values(table(spec(init=RowInit("constant", 0.25))), [1, -5]) == np.float32(0.25)).all()


def test_values_are_the_same_in_every_release() -> None:
    """What was begun with one release goes on with another, and lost rows come back alike."""
    ids = [0, 1, -1, 2**63 - 1]
    uniform = values(table(spec(init=RowInit("uniform", 0, 1 << 24), dim=2)), ids)
    assert uniform.tolist() == UNIFORM
    normal = values(table(spec(init=RowInit("normal", 0, 1), dim=2)), ids)
    assert [[value.hex() for value in row] for row in normal.astype(float).tolist()] == NORMAL


UNIFORM = [[15835942.0, 2611184.0], [5525087.0, 9045542.0], [10828324.0, 9654439.0], [5672125.0, 4854731.0]]
NORMAL = [
    ["-0x1.cb53740000000p-3", "-0x1.e5c2060000000p-3"],
    ["-0x1.6379720000000p+1", "-0x1.cb0c500000000p-3"],
    ["0x1.df1e6e0000000p-3", "-0x1.01d73a0000000p-2"],
    ["-0x1.7c9f520000000p+0", "-0x1.05dad60000000p+0"],
]
