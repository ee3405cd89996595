"""How far a model has come on its way to being usable here: told to workers that wait for it, and in status."""

from __future__ import annotations

import time
from collections.abc import Callable

from ps_protocol.errors import NotReady

SLOWEST_BYTES_PER_SECOND = 10e6
"""A write, whose progress cannot be seen, may take as long as it would at this rate."""

COMPILE_SECONDS = 600.0
"""As long may it take to compile what tables need, on a machine that does much else."""


class PlacingProgress:
    """One model being placed. Stages begin on the shard's event loop; the thread at work counts, any thread reads."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._doing = "asking for its shard map"
        self._done = 0
        #: How far an attempt has come that failed.
        self._best = 0
        self._read_bytes = 0
        self._unseen_seconds = 0.0
        self._began_at = 0.0

    def begin(self, doing: str, *, unseen_seconds: float = 0.0) -> None:
        """The next stage, in words; for ``unseen_seconds`` it counts as advancing, whether or not anything is seen."""
        self._done = self._counted() + 1
        self._doing, self._read_bytes = doing, self._read_bytes if doing == self._doing else 0
        self._unseen_seconds, self._began_at = unseen_seconds, self._clock()

    def fail(self, error: Exception) -> None:
        """It is tried again soon, from the start; that is progress once it gets further than before."""
        self._best, self._done = self.done, 0
        self._doing, self._unseen_seconds, self._read_bytes = f"cannot be placed yet: {error}", 0.0, 0

    def count(self, what: object = None) -> None:
        """One more unit of the stage is done."""
        self._done += 1

    def count_read(self, nbytes: int) -> None:
        """So many bytes more were read from a disk."""
        self._done += nbytes
        self._read_bytes += nbytes

    @property
    def done(self) -> int:
        """Rises as long as the work advances; its unit means nothing."""
        return max(self._best, self._counted())

    def _counted(self) -> int:
        unseen_seconds = min(self._clock() - self._began_at, self._unseen_seconds) if self._unseen_seconds else 0.0
        return self._done + int(1000 * unseen_seconds)

    def __str__(self) -> str:
        return f"model '{self._model}': {self._stage}"

    @property
    def _stage(self) -> str:
        return self._doing + (f", {self._read_bytes / 1e6:.0f} MB read" if self._read_bytes else "")

    def error(self, shard: int) -> NotReady:
        """For whoever asks for the model meanwhile."""
        return NotReady(
            f"model '{self._model}' is being placed on shard {shard}: {self._stage}",
            shard=str(shard),
            remedy="wait; where nothing advances, see the log of the shard",
            progress=self.done,
        )
