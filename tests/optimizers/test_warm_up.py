"""The first model of a process waits for no imports. One interpreter: about three CPU seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.optimizers.warm_up import warm_up
from ps_server.state.model_state import new_model
from ps_server.state.region import Region
from ps_server.state.replica import Step

def torch_modules():
    return {name for name in sys.modules if name.partition(".")[0] in ("torch", "sympy", "mpmath")}

if sys.argv[1] == "warm":
    warm_up()
before = torch_modules()
spec = ModelSpec("model", "torch.optim.AdamW", (Variable("v", (10,), DType.FLOAT32),), ({"lr": 0.1},))
model = new_model(ShardMap(1, spec, 1, (Slice(0, 0, 10, 0),)), 0)
model.replica.apply(Step(Region(model.replica.layout), frozenset(), ({},)))
print(len(torch_modules() - before))
"""


def loaded(how: str) -> int:
    """Modules that the first model and its first step load."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_after_it_a_model_is_made_and_stepped_without_loading_anything():
    assert loaded("warm") == 0


@pytest.mark.long
def test_without_it_the_first_model_loads_hundreds_of_modules():
    assert loaded("cold") > 100
