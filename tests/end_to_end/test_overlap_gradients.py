"""With overlap: whatever a user does to gradients, while a push is under way too, the numbers are those of torch.

Costs about 6 s.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn

from ps_server.coordinator.placement import variables
from ps_worker.memory import double_buffer, flat
from tests.support.length import few
from tests.worker.jobs import running_job

STEPS = 7


class Plain:
    """What a worker alone with overlap computes, in plain torch: parameters of a step come with the next one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.server = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.server, lr=0.05, momentum=0.5)

    @torch.no_grad()
    def step(self) -> None:
        for own, server in zip(self.parameters, self.server, strict=True):
            server.grad = None if own.grad is None else own.grad.clone()
            own.copy_(server)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)


class Way(ABC):
    """One way in which a user treats gradients; the same calls for the cluster's optimizer and for ``Plain``."""

    def __init__(self, module: nn.Module, optimizer: object) -> None:
        self.module = module
        self.optimizer = optimizer
        self.parameters = list(module.parameters())
        self.held: list[torch.Tensor] = []

    def backward(self, step: int, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(step)
        loss = sum(
            ((p - torch.randn(p.shape, generator=generator)).square().sum() for p in self.parameters), torch.zeros(())
        )
        (0.5 * factor * loss).backward()

    def before(self, step: int) -> None:
        self.backward(step)

    @abstractmethod
    def after(self, step: int) -> None:
        """What the user does behind ``optimizer.step()``."""

    def each(self, change: Callable[[torch.Tensor], object]) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                change(parameter.grad)


class SetToNone(Way):
    def after(self, step):
        self.optimizer.zero_grad()


class Zeroed(Way):
    def after(self, step):
        self.optimizer.zero_grad(set_to_none=False)


class ModelSetToNone(Way):
    def after(self, step):
        self.module.zero_grad()


class ModelZeroed(Way):
    def after(self, step):
        self.module.zero_grad(set_to_none=False)


class InTurns(Way):
    def after(self, step):
        [self.optimizer, self.module][step % 2].zero_grad(set_to_none=step % 3 == 0)


class TwoPasses(Zeroed):
    def before(self, step):
        self.backward(step)
        self.backward(step + 100)


class NeverZeroed(Way):
    def after(self, step):
        if step == 0:
            self.optimizer.zero_grad(set_to_none=False)


class WrittenAfterwards(Way):
    def after(self, step):
        self.each(lambda grad: grad.mul_(-0.5))
        if step % 3 == 0:
            self.optimizer.zero_grad(set_to_none=False)


class WrittenByNumpy(Way):
    def after(self, step):
        self.each(lambda grad: grad.numpy().fill(0.25))
        if step % 2 == 0:
            self.optimizer.zero_grad(set_to_none=False)


class Replaced(Zeroed):
    def before(self, step):
        self.backward(step)
        if step % 2:
            for parameter in self.parameters:
                parameter.grad = parameter.grad * 0.5


class ReplacedAfterwards(Zeroed):
    def after(self, step):
        super().after(step)
        self.parameters[step % 3].grad = torch.full_like(self.parameters[step % 3], 0.5)


class Held(Zeroed):
    """The user has taken the gradients once, and writes to them."""

    def before(self, step):
        self.backward(step)
        if step == 2:
            self.held = [p.grad for p in self.parameters]
        for gradient in self.held:
            gradient.add_(0.25)

    def after(self, step):
        for gradient in self.held:
            gradient.mul_(0.5)
        if step % 3:
            super().after(step)


class HeldAliases(Zeroed):
    def before(self, step):
        self.backward(step)
        if step == 2:
            self.held = [p.grad.view(-1) for p in self.parameters]
        for gradient in self.held:
            gradient.add_(0.25)

    def after(self, step):
        if step == 5:
            self.held = []
        super().after(step)


class TakenWhilePushed(Way):
    """Gradients that the user has taken from a step, and then lets go of, keep their values."""

    def after(self, step):
        if step == 2:
            self.held = [p.grad for p in self.parameters]
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=False)


class Scaled(Zeroed):
    def before(self, step):
        self.backward(step, 1024.0)
        self.each(lambda grad: grad.mul_(1 / 1024))


class Clipped(Zeroed):
    def before(self, step):
        self.backward(step)
        torch.nn.utils.clip_grad_norm_(self.parameters, 5.0)


class SomeMissing(Zeroed):
    def before(self, step):
        self.backward(step)
        if step % 2:
            self.parameters[step % 3].grad = None


WAYS = [
    SetToNone, Zeroed, ModelSetToNone, ModelZeroed, InTurns, TwoPasses, NeverZeroed, WrittenAfterwards, WrittenByNumpy,
    Replaced, ReplacedAfterwards, Held, HeldAliases, TakenWhilePushed, Scaled, Clipped, SomeMissing,
]  # fmt: skip


def model() -> nn.Module:
    """Parameters of several pages, and one of a few bytes; one is split over two shards."""
    generator = torch.Generator().manual_seed(3)
    module = nn.Module()
    for name, shape in {"wide": (64, 80), "short": (3,), "long": (5000,)}.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
    return module


def values(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize(
    ("transport", "shards", "counts", "slice_bytes"),
    [*((*pair, True, 4096) for pair in few(product(["bulk", "grpc", "shm"], [2, 1]))), ("shm", 2, False, 1 << 25)],
)
def test_whatever_is_done_to_gradients_the_numbers_are_those_of_torch(
    transport: str, shards: int, counts: bool, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``counts``: this torch tells who uses a tensor; where it does not, everything is copied."""
    monkeypatch.setattr(variables, "_SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(double_buffer, "LARGE_BYTES", 64)
    monkeypatch.setattr(flat, "can_count_users", lambda: counts)
    with running_job(shards, 1) as job, job.cluster(transport=transport) as cluster:
        for way in WAYS:
            module = model()
            optimizer = cluster.optimizer(
                torch.optim.SGD, module, lr=0.05, momentum=0.5, overlap=True, name=way.__name__
            )
            assert (optimizer._model._flat.double is not None) == counts
            go = hold_back(optimizer, monkeypatch)
            plain = Plain(model())
            ours, theirs = way(module, optimizer), way(plain.module, plain)
            for step in range(STEPS):
                theirs.before(step)
                ours.before(step)
                where = f"{way.__name__} over {transport}, step {step}"
                torch.testing.assert_close(gradients(ours), gradients(theirs), msg=lambda m, at=where: f"{at}: {m}")
                go.set()
                plain.step()
                optimizer.step()
                torch.testing.assert_close(gradients(ours), gradients(theirs), msg=lambda m, at=where: f"{at}: {m}")
                # All of it happens before the push is read.
                theirs.after(step)
                ours.after(step)
                torch.testing.assert_close(gradients(ours), gradients(theirs), msg=lambda m, at=where: f"{at}: {m}")
                torch.testing.assert_close(
                    values(ours.parameters), values(theirs.parameters), msg=lambda m, at=where: f"{at}: {m}"
                )
                torch.testing.assert_close(ours.held, theirs.held, msg=lambda m, at=where: f"{at}: {m}")
            go.set()
            optimizer.finish()
            torch.testing.assert_close(
                values(ours.parameters), [p.detach() for p in plain.server], msg=lambda m, at=where: f"{at}: {m}"
            )


def gradients(way: Way) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in way.parameters]


def hold_back(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Each exchange begins to send when the event has been set since the exchange before."""
    go = threading.Event()
    pipeline = optimizer._model.pipeline
    exchange = pipeline.exchange

    def later(push):
        assert go.wait(60)
        go.clear()
        return exchange(push)

    monkeypatch.setattr(pipeline, "exchange", later)
    return go
