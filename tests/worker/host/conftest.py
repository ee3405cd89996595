"""A folder whose path is short enough for the sockets below it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as folder:
        yield Path(folder)
