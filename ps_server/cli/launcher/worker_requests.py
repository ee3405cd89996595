"""What the coordinator of a job asks ps-run for: the other end of its engine ``file:PATH``."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from ps_protocol.errors import InvalidRequest


class WorkerRequests:
    """Read by the runner, from a file in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers.json"

    @property
    def flags(self) -> tuple[str, str]:
        """Options of ps-coordinator."""
        return "--engine", f"file:{self._path}"

    def take(self) -> tuple[int, ...]:
        """The ranks of a request that has come since the last time. Raises InvalidRequest for one of another form."""
        taken = self._path.with_suffix(".taken")
        # In one step: another one may come at any time.
        with suppress(FileNotFoundError):
            self._path.replace(taken)
            return _ranks(taken.read_text())
        return ()


def _ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = json.loads(text)["ranks"]
        if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
            raise TypeError("ranks is no list of numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"a request for workers is not understood: {error}",
            expected='{"number": 1, "workers": 2, "ranks": [0]}',
            actual=text[:100],
        ) from error
    return tuple(ranks)
