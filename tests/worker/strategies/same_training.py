"""One training, run under every strategy: what a script does, and what one process gets on the joined batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ps_worker import Strategy
from tests.end_to_end.training import loss_of, net

SAMPLES, JOINED, EPOCHS = 24, 8, 2
STEPS = EPOCHS * SAMPLES // JOINED

#: Each gradient of the training is longer.
CLIP = 0.1


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


def train(s: Strategy, *, built: bool = False, clip: float | None = None) -> dict[str, Any]:
    """The script. ``built``: it gives its optimizer, and a scheduler on it. ``clip``: the norm of each step."""
    model: torch.nn.Module = net(seed=s.rank)
    if s.rank == 0:
        model = net()
    settings = {"lr": 0.1, "momentum": 0.9}
    if built:
        given = torch.optim.SGD(model.parameters(), **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(given, 2, gamma=0.5)
        model, optimizer = s.prepare(model, given, schedulers=[scheduler], clip_grad_norm=clip)
    else:
        model, optimizer = s.prepare(model, torch.optim.SGD, clip_grad_norm=clip, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = s.distribute(DataLoader(dataset(), batch_size=JOINED // s.replicas))
    losses = []

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    for _ in range(EPOCHS):
        for batch in loader:
            losses.append(s.reduce("mean", s.run(step, batch)).item())
    return {
        "parameters": [p.tolist() for p in s.unwrap(model).state_dict().values()],
        "keys": list(model.state_dict()),
        "losses": losses,
        "lr": optimizer.param_groups[0]["lr"],
    }


class Backwards(Sampler):
    """A sampler of a user's own, which knows nothing of replicas."""

    def __iter__(self):
        return iter(range(8, -1, -1))

    def __len__(self):
        return 9


def epochs_of(s: Strategy) -> list[list[list[int]]]:
    """The samples of this replica: two shuffled epochs of 0 to 8, and one in the order of ``Backwards``."""
    numbers = TensorDataset(torch.arange(9))
    shuffled = s.distribute(DataLoader(numbers, batch_size=2, shuffle=True))
    own = s.distribute(DataLoader(numbers, batch_size=2, sampler=Backwards()))
    return [[batch[0].tolist() for batch in loader] for loader in (shuffled, shuffled, own)]


def assert_dealt(replicas: list[list[list[list[int]]]]) -> None:
    """Each sample once per epoch, another order in the second epoch, and the user's own order on each replica."""
    for epoch in range(3):
        assert sorted(x for replica in replicas for batch in replica[epoch] for x in batch) == list(range(9))
    assert replicas[0][0] != replicas[0][1]
    for replica in replicas:
        mine = [x for batch in replica[2] for x in batch]
        assert mine == sorted(mine, reverse=True)


def alone(clip: float | None = None) -> dict[str, Any]:
    """The reference: plain torch on the joined batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for _ in range(EPOCHS):
        for batch in DataLoader(dataset(), batch_size=JOINED):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return {
        "parameters": [p.tolist() for p in model.state_dict().values()],
        "keys": list(model.state_dict()),
        "losses": losses,
        "lr": optimizer.param_groups[0]["lr"],
    }


def assert_clipped(found: dict[str, Any]) -> None:
    """As one process that clips to ``CLIP``, which is not as one that does not."""
    assert_same(found, alone(CLIP))
    with pytest.raises(AssertionError):
        assert_same(found, alone())


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["keys"] == wanted["keys"]
    assert found["lr"] == wanted["lr"]
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=0, atol=1e-6)
    for one, other in zip(found["parameters"], wanted["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)
