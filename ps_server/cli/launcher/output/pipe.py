"""The read end of what one process of a job writes."""

from __future__ import annotations

import os
from typing import BinaryIO

from ps_server.cli.launcher.output.lines import LineSplitter

READ_BYTES = 1 << 16


class OutputPipe:
    """Used by the runner's thread. ``output`` is readable when there is something to read, and at the end."""

    def __init__(self, log: BinaryIO | None) -> None:
        """``log`` gets a copy of all that is read."""
        self.output, self._write_end = os.pipe()
        os.set_blocking(self.output, False)
        self._log = log
        self._splitter = LineSplitter()

    def read_bytes(self) -> bytes | None:
        """What has arrived, up to 64 KB; None without data and at the end."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return None
        if data and self._log is not None:
            self._log.write(data)
        return data or None

    def read(self) -> list[str] | None:
        """The complete lines that have arrived, after one read; None without data and at the end."""
        data = self.read_bytes()
        return None if data is None else self._splitter.feed(data)

    def read_rest(self) -> list[str]:
        """After the end: the rest of the pipe and an incomplete last line. Closes the pipe."""
        lines: list[str] = []
        while (more := self.read()) is not None:
            lines += more
        os.close(self.output)
        return lines + self._splitter.flush()
