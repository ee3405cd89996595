"""The models of one optimizer together: the first, and one for each parameter group that was added later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ps_protocol.errors import UnsupportedOptimizer
from ps_protocol.model.spec import NonFinite
from ps_worker.model.optimizer_state import StateByNumber
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.summary import StepSummary

Residuals = Mapping[int, Mapping[str, torch.Tensor]]
"""What a wire format has left out of gradients, by number of the variable."""

_RESIDUALS = "ps_residuals"
"""Key in a ``state_dict``: what this worker's wire format has left out of gradients. It belongs to one rank."""


class ClosedModel:
    """The model of an optimizer that was closed: every attribute but its name raises UnsupportedOptimizer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        """Raises UnsupportedOptimizer."""
        raise UnsupportedOptimizer(
            f"the optimizer of model '{self.name}' was closed",
            actual=attribute,
            remedy="give its parameters to a new one: cluster.optimizer(...) or cluster.adopt(...)",
        )


def step_together(models: Sequence[RemoteModel], weight: float) -> None:
    """Step each model, or none if a gradient of any holds NaN or infinity and the policy is not "allow".

    Raises as the step of one model. After an error of a later one, those before it have stepped.
    """
    wrong = _nonfinite(models)
    for model in models:
        model.step(weight, skip=wrong is not None)


def summary_of(models: Sequence[RemoteModel]) -> StepSummary | None:
    """Return the result of the last step over all models; None before the first."""
    found = [model.last for model in models if model.last is not None]
    if not found:
        return None
    return StepSummary(
        versions=tuple(version for each in found for version in each.versions),
        outcomes=tuple(outcome for each in found for outcome in each.outcomes),
        staleness=max(each.staleness for each in found),
        clock=found[0].clock,
        transferred_bytes=sum(each.transferred_bytes for each in found),
        waited_seconds=sum(each.waited_seconds for each in found),
    )


def save_together(
    models: Sequence[RemoteModel], rank: int
) -> tuple[dict[int, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]:
    """The state by number of the parameter over all models; and what the wire format of the worker ``rank`` has left
    out of gradients, for ``load_residuals``.
    """
    state: dict[int, Mapping[str, Any]] = {}
    left: list[Residuals] = []
    for first, model in _numbered(models):
        own, residuals = model.save_state()
        state.update({first + number: values for number, values in own.items()})
        left.append(residuals)
    return state, {_RESIDUALS: {"rank": rank, "state": left[0], "added": left[1:]}} if any(left) else {}


def load_residuals(models: Sequence[RemoteModel], state_dict: Mapping[str, Any], rank: int) -> None:
    """Take over what an earlier process of the worker ``rank`` had left out, if ``state_dict`` is from it."""
    residuals = state_dict.get(_RESIDUALS)
    if residuals and residuals["rank"] == rank:
        for model, left in zip(models, [residuals["state"], *residuals.get("added", ())], strict=False):
            model.pipeline.load_residuals(left)


def load_together(models: Sequence[RemoteModel], state: StateByNumber) -> None:
    """Give the shards this state, by number of the parameter over all models. Raises PsError."""
    for first, model in _numbered(models):
        own = range(first, first + len(model.parameters))
        model.load_state({number - first: dict(state[number]) for number in own if number in state})


def find_parameter(models: Sequence[RemoteModel], parameter: torch.Tensor) -> tuple[RemoteModel, int] | None:
    """The model of ``parameter`` and its number there; None: it is of none."""
    for model in models:
        for number, each in enumerate(model.parameters):
            if each is parameter:
                return model, number
    return None


def _numbered(models: Sequence[RemoteModel]) -> Iterator[tuple[int, RemoteModel]]:
    """Each model with the number of its first parameter over all."""
    first = 0
    for model in models:
        yield first, model
        first += len(model.parameters)


def _nonfinite(models: Sequence[RemoteModel]) -> str | None:
    """Name of the first variable whose gradient holds NaN or infinity; None also where that is allowed.

    Raises NonFiniteGradient where it is refused.
    """
    for model in models:
        if model.spec.nonfinite is NonFinite.ALLOW:
            return None
        for variable, parameter in zip(model.spec.variables, model.parameters, strict=False):
            if parameter.grad is None or bool(torch.isfinite(parameter.grad).all()):
                continue
            if model.spec.nonfinite is NonFinite.REFUSE:
                raise model.refusal(variable.name)
            return variable.name
    return None
