"""The contract that an author runs: torch's classes keep it, and each way to break it is found and named. Costs 3 s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ps_worker
from ps_protocol.errors import UnsupportedOptimizer
from ps_server.optimizers.contract import Contract
from ps_worker import optimizers
from tests.support import user_optimizers as users

from .models import ELEMENTWISE_CASES, MATRICES, SHAPED_CASES, case_id

EXAMPLE = Path(__file__).parents[2] / "examples" / "lion"


def lion() -> type[torch.optim.Optimizer]:
    """The example's class, imported as shards import it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from lion import Lion
    finally:
        sys.path.remove(str(EXAMPLE))
    return Lion


@pytest.mark.parametrize(("name", "options"), [*ELEMENTWISE_CASES, *SHAPED_CASES], ids=case_id)
def test_the_classes_of_torch_keep_it(name, options):
    shapes = {"shapes": MATRICES} if name == "Muon" else {}
    Contract(getattr(torch.optim, name), options, **shapes).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("torch_class", "options"),
    [
        (lion(), {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
        (users.Descent, {"lr": 0.1}),
        (users.Damped, {"lr": 0.1, "momentum": 0.8, "damp": 0.25}),
        (users.Counting, {"lr": 0.1}),
        (users.NormedRows, {"lr": 0.1}),
    ],
)
def test_classes_of_users_keep_it(torch_class, options, dtype):
    optimizers.check(torch_class, options, dtype=dtype)


def test_what_users_call_names_the_check_that_fails_and_a_dtype_that_shards_lack():
    with pytest.raises(ps_worker.UnsupportedOptimizer, match="breaks the contract of shards: steps on a shard"):
        optimizers.check(users.Normed, {"lr": 0.1})
    with pytest.raises(ps_worker.ConfigError, match="complex64"):
        optimizers.check(torch.optim.SGD, {"lr": 0.1}, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("torch_class", "check", "found"),
    [
        (users.HidesAnArgument, "check_arguments", "no 'hidden'"),
        (users.TakesAnything, "check_arguments", r"\*others"),
        (users.CountsInGroups, "check_state", "'k' changed"),
        (users.CountsInNumbers, "check_state", "'step' is int"),
        (users.KeepsRows, "check_state", r"'rows' has shape \(2,\)"),
        (users.Normed, "check_steps", "as in one process"),
        (users.Normed, "check_split", "parts of variables"),
        (users.Noisy, "check_repeats", "bit for bit"),
        (users.KeepsItsOwn, "check_restores", "bit for bit"),
    ],
)
def test_each_way_to_break_it_is_found_by_its_check(torch_class, check, found):
    contract = Contract(torch_class, {"lr": 0.1})
    with pytest.raises(UnsupportedOptimizer, match=found) as caught:
        getattr(contract, check)()
    assert caught.value.remedy
    with pytest.raises(UnsupportedOptimizer):
        contract.check()


def test_a_class_without_a_learning_rate_breaks_it():
    with pytest.raises(UnsupportedOptimizer, match="a learning rate under 'lr'"):
        Contract(users.HasNoRate, {"speed": 0.1}).check_arguments()


def test_a_class_that_nobody_registered_has_no_contract():
    with pytest.raises(UnsupportedOptimizer, match=r"user_optimizers.Plain is not registered"):
        Contract(users.Plain, {"lr": 0.1})
