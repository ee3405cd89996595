"""The device of a worker's model."""

from __future__ import annotations

import torch

from ps_protocol.errors import ConfigError


def check_device(name: str | None) -> None:
    """Raises ConfigError when torch has no device of this name."""
    try:
        torch.device(name or "cpu")
    except RuntimeError as error:
        raise ConfigError(
            "unknown device",
            expected='"cpu", "cuda:0" and the like',
            actual=repr(name),
            remedy="correct the device argument of connect() or PS_DEVICE",
        ) from error


def device_of(name: str | None, rank: int) -> torch.device:
    """The device called ``name``; without a name a GPU, by ``rank``, where there is one."""
    if name is not None:
        return torch.device(name)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
