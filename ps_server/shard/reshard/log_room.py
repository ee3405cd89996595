"""Room in the log for what comes in a move: held from before the pause until that is written, or does not come."""

from __future__ import annotations

from ps_server.log.entries import UpdateLog


class LogRoom:
    """Of one shard, on its event loop."""

    def __init__(self, log: UpdateLog) -> None:
        self._log = log
        self._held: list[int] = []

    async def hold(self, *sizes: int) -> None:
        """Have room for records of so many bytes, and for no others. Raises StorageFull; then nothing is held."""
        self.release()
        try:
            for nbytes in sizes:
                await self._log.reserve(nbytes)
                self._held.append(nbytes)
        except BaseException:
            self.release()
            raise

    def take(self, least: int, most: float) -> int | None:
        """Hand on room for a record of ``least`` to ``most`` bytes; returns what its taker has to release, None: none.

        To reserve it again might wait for another file, for updates under way that are written already count, too.
        """
        found = min((nbytes for nbytes in self._held if least <= nbytes <= most), default=None)
        if found is not None:
            self._held.remove(found)
        return found

    def release(self) -> None:
        """Let the next that reserves take it."""
        held, self._held = self._held, []
        for nbytes in held:
            self._log.release(nbytes)
