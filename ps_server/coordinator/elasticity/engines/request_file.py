"""Asks by a file, which ps-run or a program of the user's own reads."""

from __future__ import annotations

import json
from pathlib import Path

from ps_protocol.errors import Unavailable


class RequestFile:
    """The engine ``file:PATH``. The file holds the last request as JSON: number (from 1), workers, ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Replace the file, in one step. Raises Unavailable when it cannot be written."""
        self._number += 1
        text = json.dumps({"number": self._number, "workers": wanted, "ranks": list(ranks)})
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            part.write_text(text)
            part.replace(self._path)
        except OSError as error:
            raise Unavailable(f"the request for workers cannot be written: {error}", remedy="see --engine") from error
        return f"request {self._number} is in {self._path}"

    def describe(self) -> str:
        """The file."""
        return f"the reader of {self._path}"
