"""The examples of docs/strategies.md run as they are printed. 3 CPU seconds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ps_worker
from tests.end_to_end.training import net
from tests.worker.jobs import running_job
from tests.worker.strategies.same_training import dataset

PAGE = Path(__file__).parents[3] / "docs" / "strategies.md"

EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_has_examples():
    assert len(EXAMPLES) == 12


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs_as_printed(code, tmp_path, monkeypatch):
    monkeypatch.delenv("PS_STRATEGY", raising=False)
    features, labels = (tensor.numpy() for tensor in dataset().tensors)
    given = {
        "ps_worker": ps_worker,
        "torch": torch,
        "Net": net,
        "loader": DataLoader(dataset(), batch_size=8),
        "dataset": dataset(),
        "loss_fn": nn.functional.cross_entropy,
        "accuracy": lambda output, target: (output.argmax(1) == target).float().mean(),
        "features": np.asarray(features),
        "labels": np.asarray(labels),
        "features_tensor": dataset().tensors[0],
        "labels_tensor": dataset().tensors[1],
        "folder": tmp_path,
    }
    names = dict(zip("abcdef", np.asarray(features).T, strict=True))
    pq.write_table(pa.table({**names, "label": np.asarray(labels)}), tmp_path / "clicks.parquet")
    if "parameter_server" not in code:
        exec(code, given)
        return
    with running_job() as job:
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        exec(code, given)
