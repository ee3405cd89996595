"""torch's compiler is loaded by who compiles, not by optimizers."""

from __future__ import annotations

from tests.support.interpreters import run

_PROGRAM = """
import sys
import torch
from ps_protocol.model.late_compiler import COMPILER, load_compiler_late
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import ELEMENTWISE
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.state.model_state import new_model
from ps_server.state.region import Region
from ps_server.state.replica import Step

def torch_modules():
    return {name for name in sys.modules if name.partition(".")[0] in ("torch", "sympy", "mpmath")}

def methods():
    return [torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.add_param_group]

def step(parameter, optimizer):
    parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert parameter.grad is None and len(optimizer.param_groups) == 2

before, own = torch_modules(), methods()
for optimizer in ELEMENTWISE:
    spec = ModelSpec("model", optimizer, (Variable("v", (10,), DType.FLOAT32),), ({"lr": 0.1},))
    model = new_model(ShardMap(1, spec, 1, (Slice(0, 0, 10, 0),)), 0)
    for _ in range(2):
        model.replica.apply(Step(Region(model.replica.layout), frozenset(), ({},)))
assert torch_modules() == before, sorted(torch_modules() - before)[:20]

parameter = torch.zeros(1, requires_grad=True)
step(parameter, torch.optim.SGD([parameter]))
assert COMPILER not in sys.modules
assert methods() == own

compiled = torch.compile(lambda x: (step(parameter, torch.optim.SGD([parameter])), x + 1)[1], backend="eager")
assert compiled(torch.ones(1)).item() == 2.0
step(parameter, torch.optim.SGD([parameter]))
assert methods() == own
for method in methods():
    kept = vars(method.__wrapped__)["__dynamo_disable"]
    assert kept.__module__.startswith(COMPILER), kept
load_compiler_late(torch.optim.Optimizer)
assert vars(methods()[0].__wrapped__)["__dynamo_disable"].__module__.startswith(COMPILER)
print("as it should be")
"""


def test_optimizers_load_it_neither_on_shards_nor_in_workers_and_keep_to_its_rules_once_it_is_there():
    done = run("-c", _PROGRAM)
    assert done.stdout == "as it should be\n", done.stderr
