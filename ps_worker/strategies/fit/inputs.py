"""Loaders of what ``fit`` and ``evaluate`` are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.errors import ConfigError


def as_loader(data: Any, batch_size: int, *, shuffle: bool) -> Any:
    """``data`` itself, or a DataLoader of a tuple of NumPy arrays or tensors. Raises ConfigError for unequal ones."""
    if not (isinstance(data, tuple) and data and all(isinstance(each, np.ndarray | Tensor) for each in data)):
        return data
    lengths = {len(each) for each in data}
    if len(lengths) > 1:
        raise ConfigError(
            "the arrays have different numbers of samples", actual=", ".join(str(len(each)) for each in data)
        )
    tensors = [torch.as_tensor(each) for each in data]
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


def parts(batch: Any) -> tuple[list[Any], Any]:
    """The model's inputs and the target of ``batch``. Raises ConfigError for a batch without a target."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ConfigError(
            "fit() does not know the target of a batch",
            expected="a sequence of inputs and, last, the target",
            actual=type(batch).__name__,
            remedy="have the dataset or collate_fn give (input, target), or write the loop with s.run()",
        )
    return list(batch[:-1]), batch[-1]
