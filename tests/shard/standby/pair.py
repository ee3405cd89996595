"""Two processes for one shard, started alike, as an operator would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ps_protocol.cluster.view import Member, Role
from ps_server.log.record import decode_header
from tests.recovery.cluster import Cluster, Program
from tests.support.shards import wait_until

HAS_EVERYTHING = "shard 0 reports that its standby has everything it acknowledges"


class Pair:
    """``first`` holds the place to begin with, ``second`` follows."""

    def __init__(self, cluster: Cluster, options: Sequence[str], first: Sequence[str] = ()) -> None:
        """Both get ``options``, and ``first`` the first alone."""
        self.cluster = cluster
        self.first, self.second = (
            cluster.shard(0, "--standby", *options, *more, name=name, data=cluster.folder / f"data-{name}")
            for name, more in (("first", first), ("second", ()))
        )
        cluster.shards = [self.first]

    def start(self) -> None:
        self.cluster.start()
        self.second.start()
        self.wait_until_covered(1)

    @property
    def holder(self) -> Member | None:
        """Who holds the place."""
        return self.cluster.status().view.live(Role.SHARD).get(0)

    def wait_for(self, program: Program) -> None:
        """Until ``program`` holds the place."""
        address = program.ready_file.read_text().strip()
        try:
            wait_until(lambda: (holder := self.holder) is not None and holder.address == address)
        except AssertionError as error:
            for each in (self.cluster.coordinator, program):
                error.add_note(f"{each.name} said:\n{each.said[-5000:]}")
            raise

    def wait_until_covered(self, times: int) -> None:
        """Until the coordinator has heard this often that a standby has everything."""
        wait_until(lambda: self.cluster.coordinator.said.count(HAS_EVERYTHING) >= times)

    @property
    def first_data(self) -> Path:
        """Where the first keeps its data."""
        return self.cluster.folder / "data-first"

    def wait_until_held(self, program: Program, number: int) -> None:
        """Until the log of ``program`` has record ``number``."""
        log = self.cluster.folder / f"data-{program.name}" / "shard-0" / "log"

        def held() -> bool:
            numbers = [0]
            for path in log.glob("[0-9]*.log"):
                try:
                    data, offset = memoryview(path.read_bytes()), 0
                except FileNotFoundError:  # a snapshot has made it a spare one meanwhile
                    return False
                while (header := decode_header(data[offset:])) is not None:
                    numbers.append(header.number)
                    offset += header.record_bytes
            return max(numbers) >= number

        wait_until(held)
