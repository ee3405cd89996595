"""The file that a fit continues from: written by the chief after each epoch, as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ps_protocol.errors import DamagedData
from ps_protocol.files import PUBLIC_MODE, replacing

_KEYS = {"model", "optimizer", "scheduler", "scaler", "history"}


def write(path: Path, contents: dict[str, Any]) -> None:
    """Replace ``path``. After the return it survives a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PUBLIC_MODE) as file:
        torch.save(contents, file)


def read(path: Path) -> dict[str, Any]:
    """What ``write`` has written. Raises DamagedData for another file."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedData(f"{path} cannot be read as a checkpoint of fit(): {error}"[:300]) from error
    if not isinstance(contents, dict) or contents.keys() != _KEYS:
        raise DamagedData(
            f"{path} is no checkpoint of fit()",
            expected=", ".join(sorted(_KEYS)),
            remedy="give checkpoint= the name of another file",
        )
    return contents
