"""The examples of docs/recipes.md run as they are printed, and its numbers are those of runs. 4 CPU seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ps_worker
from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.training import net
from tests.worker.jobs import running_job, together

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()

TORCHREC, DEEPCTR, LEARNING_RATE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

STEPS, WORKERS = 20, 2


def run(code: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """What ``code`` has made as the one worker of a job of its own."""
    names = {"ps_worker": ps_worker, "torch": torch, **given}
    with running_job(2) as job:
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        torch.manual_seed(0)
        exec(code, names)
    return names


KNOWS_THE_IDS = 0.35
"""A loss that only a model reaches that knows the ids; of a fair coin it is 0.69."""


class Jagged(Dataset):
    """Batches, whose ids ``collection`` makes a KeyedJaggedTensor of."""

    def __init__(self) -> None:
        self.collection: Callable[..., object] = list
        self._made = [jagged_batch(torch.Generator().manual_seed(number)) for number in range(16)]

    def __len__(self):
        return len(self._made)

    def __getitem__(self, number):
        dense, values, lengths, labels = self._made[number]
        ids = self.collection(["product", "viewed", "user"], values, lengths)
        return SimpleNamespace(dense_features=dense, sparse_features=ids, labels=labels)


def test_a_model_of_torchrec_learns_what_its_ids_say(monkeypatch):
    data = Jagged()
    # The class is the recipe's own, so it is there when the recipe has defined it.
    code = TORCHREC.replace("with ps_worker.connect", "data.collection = KeyedJaggedTensor\nwith ps_worker.connect")
    names = run(code, monkeypatch, data=data, loader=DataLoader(data, batch_size=None))
    assert sum(names["losses"][-16:]) / 16 < KNOWS_THE_IDS
    ids, offsets = names["KeyedJaggedTensor"](["a", "b"], torch.tensor([5, 6, 7]), torch.tensor([1, 0, 0, 2])).bags()
    assert {name: each.tolist() for name, each in ids.items()} == {"a": [5], "b": [6, 7]}
    assert {name: each.tolist() for name, each in offsets.items()} == {"a": [0, 1], "b": [0, 0]}


def jagged_batch(generator: torch.Generator, samples: int = 32) -> tuple[torch.Tensor, ...]:
    """Labels depend on the product alone: whether its number is even. Some samples have viewed nothing."""
    product = torch.randint(0, 40, (samples,), generator=generator)
    viewed = torch.randint(0, 3, (samples,), generator=generator)
    lengths = torch.cat([torch.ones(samples, dtype=torch.int64), viewed, torch.ones(samples, dtype=torch.int64)])
    others = torch.randint(0, 40, (int(viewed.sum()),), generator=generator)
    users = torch.randint(0, 10, (samples,), generator=generator) + 10**12
    dense = torch.randn(samples, 4, generator=generator)
    return dense, torch.cat([product, others, users]), lengths, (product % 2).float()


def test_a_model_of_deepctr_learns_an_interaction_of_ids(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    sparse = torch.stack([torch.randint(0, 6, (512,), generator=generator) for _ in range(2)], dim=1)
    labels = ((sparse[:, 0] + sparse[:, 1]) % 2).float()
    dense = torch.randn(512, 4, generator=generator)
    names = run(DEEPCTR, monkeypatch, sparse=sparse * 10**9, dense=dense, labels=labels)
    assert names["history"][-1]["loss"] < KNOWS_THE_IDS


def test_the_printed_learning_rate_is_that_of_the_page(monkeypatch):
    names = run(LEARNING_RATE, monkeypatch, Net=net)
    assert names["optimizer"].param_groups[0]["lr"] == 0.1


def by_formula(mode: str, lr: float) -> float:
    if mode == "sync":
        return (1 - lr) ** STEPS
    before, now = 1.0, 1.0
    for _ in range(WORKERS * STEPS):
        before, now = now, now - lr * before
    return now


def trained(mode: str, lr: float) -> float:
    """w of w²/2 after the steps of both workers; in async they take turns."""
    with running_job(1, WORKERS, consistency=Consistency(Mode(mode))) as job:
        clusters = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        weights = [torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in clusters]

        def declare(rank):
            return clusters[rank].optimizer(torch.optim.SGD, [weights[rank]], lr=lr)

        def step(rank):
            weights[rank].grad = weights[rank].detach().clone()
            optimizers[rank].step()

        optimizers = together(lambda: declare(0), lambda: declare(1))
        for _ in range(STEPS):
            if mode == "sync":
                together(lambda: step(0), lambda: step(1))
            else:
                step(0)
                step(1)
        optimizers[0].pull()
        return weights[0].item()


def test_the_numbers_of_the_page_are_those_of_runs():
    rows = re.findall(r"\| `(a?sync)` \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    assert len(rows) == 3
    for mode, lr, printed in rows:
        found = trained(mode, float(lr))
        assert found == pytest.approx(by_formula(mode, float(lr)), abs=1e-12)
        assert f"{found:.4f}" == printed
