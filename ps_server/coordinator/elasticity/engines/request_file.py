"""Requests workers through a file, which ps-run or the user's program reads."""

from __future__ import annotations

import json
from pathlib import Path

from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.errors import Unavailable
from ps_protocol.files import PUBLIC_MODE, replace_file
from ps_server.coordinator.elasticity.engines.base import SHARDS, WORKERS


class RequestFile:
    """The engine ``file:PATH``. The file holds the last request as JSON: number (from 1), workers, ranks; once the job
    was scaled also ``run``, the ranks and the shards that are to run.
    """

    scales = frozenset({WORKERS, SHARDS})
    by_count = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._workers = 0
        self._run: dict[str, list[int]] = {}

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Replace the file atomically. Raises Unavailable when it cannot be written."""
        self._workers = wanted
        return self._write(ranks)

    def scale(self, order: ScaleOrder) -> str:
        """As ``request``."""
        run = {"workers": order.ranks, "shards": order.shards, "done": order.done_ranks or None}
        self._run = {name: sorted(numbers) for name, numbers in run.items() if numbers is not None}
        self._workers = self._workers if order.ranks is None else len(order.ranks)
        return self._write(())

    def _write(self, ranks: tuple[int, ...]) -> str:
        self._number += 1
        plain = {"number": self._number, "workers": self._workers, "ranks": list(ranks)}
        text = json.dumps(plain | ({"run": self._run} if self._run else {}))
        try:
            replace_file(self._path, text.encode(), PUBLIC_MODE, durable=False)
        except OSError as error:
            raise Unavailable(f"the request for workers cannot be written: {error}", remedy="see --engine") from error
        return f"request {self._number} is in {self._path}"

    def describe(self) -> str:
        """The file."""
        return f"the reader of {self._path}"
