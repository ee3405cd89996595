"""The trace of a job: the files of its processes, made one at the end."""

from __future__ import annotations

from pathlib import Path

from ps_protocol.errors import PsError
from ps_protocol.tracing.merge import MERGED, files_in, merge
from ps_protocol.tracing.trace_file import open_folder


class JobTrace:
    """Owns ``trace.json`` in one folder. Files of earlier jobs there stay, and are not part of it."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises ConfigError."""
        open_folder(folder)
        self.folder = folder.absolute()
        self._earlier = set(files_in(self.folder))

    def finish(self) -> str:
        """Join the files of the job; returns what became of it, in words."""
        target = self.folder / MERGED
        found = [path for path in files_in(self.folder) if path not in self._earlier]
        try:
            merge(found, target)
        except (OSError, PsError) as error:
            return f"no trace: {error}"
        return f"trace of {len(found)} processes: {target}; open it in https://ui.perfetto.dev or chrome://tracing"
