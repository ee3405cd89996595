"""What one undisturbed worker ends with, bit for bit: the shard's own optimizer, without any process around it."""

from __future__ import annotations

import torch

from ps_protocol.layout import Layout
from ps_protocol.model import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.optimizers import Region, Replica, Step
from tests.recovery.scripts import gradients_of, make_model


def train(steps: int, optimizer: str) -> bytes:
    """The bytes of the parameters after ``steps`` steps of one worker on one shard."""
    model = make_model()
    parameters = list(model.parameters())
    variables = tuple(Variable(f"v{i}", tuple(p.shape), DType.FLOAT32) for i, p in enumerate(parameters))
    spec = ModelSpec("reference", f"torch.optim.{optimizer}", variables, ({"lr": 0.01},))
    slices = tuple(Slice(i, 0, v.rows, 0) for i, v in enumerate(variables))
    layout = Layout.of(ShardMap(1, spec, 1, slices), 0)
    replica, gradients = Replica(layout), Region(layout)
    for index, parameter in enumerate(parameters):
        replica.region.slice(index).copy_(parameter.detach())
    for step in range(steps):
        gradients_of(model, 0, step)
        for index, parameter in enumerate(parameters):
            gradients.slice(index).copy_(parameter.grad)  # type: ignore[arg-type]
        replica.apply(Step(gradients, frozenset(), spec.group_options))
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter.copy_(replica.region.slice(index))
    return b"".join(p.detach().numpy().tobytes() for p in parameters)
