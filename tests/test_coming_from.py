"""The loop of docs/coming-from.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.end_to_end.training import net
from tests.worker.jobs import running_job

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text()


def test_the_loop_for_those_who_come_from_data_parallel_training_trains_and_saves(monkeypatch, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    width = next(model.parameters()).shape[1]
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs, model(inputs).detach() + 1), batch_size=4)
    with running_job(2) as job:
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        monkeypatch.chdir(tmp_path)
        exec(code, {"Net": lambda: model, "loss_fn": torch.nn.functional.mse_loss, "loader": loader})
    saved = [torch.load(tmp_path / f"epoch{epoch}.pt") for epoch in range(2)]
    assert all(not torch.equal(saved[0][name], value) for name, value in before.items())
    assert all(torch.equal(saved[1][name], value) for name, value in model.state_dict().items())
