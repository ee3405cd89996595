"""Row optimizers do what torch's do with sparse gradients, or what their papers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Ids, TableSpec
from ps_server.tables.step import RowStep
from tests.support.length import few
from tests.tables.samples import random_ids, spec, table, use, values

DIM, IDS, STEPS = 6, 40, 25
Floats = npt.NDArray[np.float32]
Update = tuple[Ids, Floats]


def _updates(seed: int, ids: Ids, dim: int = DIM) -> list[Update]:
    """Random subsets of ids, given as places, and gradients for them."""
    random = np.random.default_rng(seed)
    places = [random.permutation(ids.size)[: random.integers(0, ids.size)] for _ in range(STEPS)]
    return [(chosen, random.standard_normal((chosen.size, dim)).astype(np.float32)) for chosen in places]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # From within torch's Adagrad.
@pytest.mark.parametrize(
    ("declared", "make"),
    [
        (spec("sgd", dim=DIM, lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        (spec("adagrad", dim=DIM, lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2)),
        (
            spec("adagrad", dim=DIM, lr=0.2, lr_decay=0.1, initial=0.5, eps=1e-3),
            lambda p: torch.optim.Adagrad(p, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
        ),
        (spec("adam", dim=DIM, lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
        (
            spec("adam", dim=DIM, lr=0.1, beta1=0.5, beta2=0.9, eps=1e-3),
            lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.5, 0.9), eps=1e-3),
        ),
    ],
    ids=["sgd", "adagrad", "adagrad with decay", "adam", "adam with other betas"],
)
def test_rows_follow_torch(declared: TableSpec, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
    ids = random_ids(np.random.default_rng(3), IDS)
    held = table(declared)
    weight = torch.nn.Parameter(torch.from_numpy(values(held, ids)))
    optimizer = make([weight])
    for places, gradients in _updates(4, ids):
        use(held, ids[places], gradients)
        indexes, given = torch.from_numpy(places)[None], torch.from_numpy(gradients)
        weight.grad = torch.sparse_coo_tensor(indexes, given, (IDS, DIM), check_invariants=False)
        optimizer.step()
    np.testing.assert_allclose(values(held, ids), weight.detach().numpy(), rtol=2e-6, atol=1e-6)


def _rowwise_adagrad(o: dict[str, float], row: Any, state: Any, gradient: Any) -> None:
    state["sum"] = state.get("sum", o["initial"]) + np.mean(gradient**2)
    row -= o["lr"] * gradient / (np.sqrt(state["sum"]) + o["eps"])


def _ftrl(o: dict[str, float], row: Any, state: Any, gradient: Any) -> None:
    """McMahan et al. 2013, algorithm 1, with the first sums of TensorFlow."""
    n = state.get("n", np.full_like(row, o["initial"]))
    new = n + gradient**2
    sigma = (new ** -o["power"] - n ** -o["power"]) / o["lr"]
    z = state.get("z", np.zeros_like(row)) + gradient - sigma * row
    state["n"], state["z"] = new, z
    divisor = (o["beta"] + new ** -o["power"]) / o["lr"] + 2 * o["l2"]
    row[:] = np.where(np.abs(z) <= o["l1"], 0, -(z - np.sign(z) * o["l1"]) / divisor)


def _sgd(o: dict[str, float], row: Any, state: Any, gradient: Any) -> None:
    row -= o["lr"] * (gradient + o["weight_decay"] * row)


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("sgd", _sgd, {"lr": 0.1, "weight_decay": 0.3}),
        ("rowwise_adagrad", _rowwise_adagrad, {"lr": 0.3}),
        ("rowwise_adagrad", _rowwise_adagrad, {"lr": 0.3, "initial": 0.2, "eps": 0.01}),
        ("ftrl", _ftrl, {"lr": 0.3}),
        ("ftrl", _ftrl, {"lr": 0.3, "l1": 0.4, "l2": 0.2, "beta": 1.0}),
        ("ftrl", _ftrl, {"lr": 0.3, "power": -0.7, "l1": 0.1}),
    ],
)
@pytest.mark.parametrize("max_norm", [0.0, 1.5])
@pytest.mark.parametrize("dim", [1, 6, 19])
def test_rows_follow_the_paper(name: str, reference: Any, options: dict[str, float], max_norm: float, dim: int) -> None:
    ids = random_ids(np.random.default_rng(5), IDS)
    held = table(spec(name, dim=dim, max_norm=max_norm, **options))
    rows = values(held, ids).astype(np.float64)
    states: list[dict[str, Any]] = [{} for _ in ids]
    for places, gradients in _updates(6, ids, dim):
        use(held, ids[places], gradients)
        for place, gradient in zip(places, gradients.astype(np.float64), strict=True):
            norm = np.linalg.norm(gradient)
            clipped = gradient * (max_norm / norm if 0 < max_norm < norm else 1)
            reference({**ROW_OPTIMIZERS[name].defaults(), **options}, rows[place], states[place], clipped)
    np.testing.assert_allclose(values(held, ids), rows, rtol=2e-5, atol=2e-6)


def test_each_update_may_have_a_learning_rate_of_its_own() -> None:
    held = table(spec("sgd", dim=1, lr=1.0))
    before = values(held, [7])
    one = np.ones((1, 1), np.float32)
    for updates, lr in enumerate((0.5, 0.25), 1):
        held.apply(RowStep(0, np.array([7]), one, updates, {"lr": lr}))
    np.testing.assert_allclose(values(held, [7]), before - 0.75, rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_scale_multiplies_the_learning_rate(name: str) -> None:
    scaled, other = table(spec(name, lr=0.4)), table(spec(name, lr=0.1))
    gradients = np.random.default_rng(7).standard_normal((5, 4)).astype(np.float32)
    scaled.apply(RowStep(0, np.arange(5), gradients, 1, scaled.spec.options), scale=0.25)
    other.apply(RowStep(0, np.arange(5), gradients, 1, other.spec.options))
    assert values(scaled, range(5)).tobytes() == values(other, range(5)).tobytes()


def test_a_scale_makes_a_step_of_ftrl_smaller() -> None:
    whole, half = table(spec("ftrl")), table(spec("ftrl"))
    gradients = np.ones((1, 4), np.float32)
    for held in (whole, half):
        use(held, [1], gradients)
    before = values(whole, [1])
    for held, scale in ((whole, 1.0), (half, 0.5)):
        held.apply(RowStep(0, np.array([1]), gradients, 2, held.spec.options), scale)
    assert (np.abs(values(half, [1]) - before) < np.abs(values(whole, [1]) - before)).all()


@pytest.mark.parametrize("name", few(ROW_OPTIMIZERS, 2))
def test_memory_that_may_only_be_read_will_do_for_gradients(name: str) -> None:
    ids = np.frombuffer(np.arange(3).tobytes(), np.int64)
    gradients = np.frombuffer(np.ones((3, 4), np.float32).tobytes(), np.float32).reshape(3, 4)
    held, other = table(spec(name)), table(spec(name))
    held.apply(RowStep(0, ids, gradients, 1, held.spec.options))
    use(other, range(3), np.ones((3, 4), np.float32))
    assert values(held, range(3)).tobytes() == values(other, range(3)).tobytes()
