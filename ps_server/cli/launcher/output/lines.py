"""Splits the bytes of a pipe into lines, as a terminal would have shown them."""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 16


class LineSplitter:
    """Used by one thread, one per pipe. A line longer than 64 KB is split; an incomplete last line is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [_shown(line) for line in lines]

    def flush(self) -> list[str]:
        """The incomplete last line."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    # A progress bar rewrites its line after each carriage return; only the last state is visible.
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
