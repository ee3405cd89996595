"""How long busy members fall silent: many processes that compute without a pause, on few cores.

``python -m benchmarks.leases [MEMBERS] [SECONDS]``. Each member holds its interpreter's lock all the time, as a
training loop does at its worst; what is shown is the longest time that the coordinator heard nothing of each.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time

from benchmarks.cluster import running_cluster
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import JoinRequest, Role

_EVERY_SECONDS = 0.2


def busy_member(address: str) -> None:
    """Join as a worker, then compute until the process is ended."""
    client = CoordinatorClient(address)
    Membership.join(client, JoinRequest(Role.WORKER), timeout_seconds=300.0)
    while True:
        sum(range(100_000))


def silences(address: str, members: int, seconds: float) -> tuple[list[float], int]:
    """The longest silence of each member within ``seconds`` from when all are there, and how many leases ended."""
    client = CoordinatorClient(address)
    worst: dict[int, float] = {}
    ended, end = 0, 0.0
    while not end or time.monotonic() < end:
        status = client.get_status(timeout_seconds=60.0)
        live = [each for each in status.members if not each.gone]
        ended = len(status.members) - len(live)
        if not end and len(live) + ended >= members:
            end = time.monotonic() + seconds
        for each in live:
            number = each.member.incarnation
            worst[number] = max(worst.get(number, 0.0), each.seconds_since_heartbeat)
        time.sleep(_EVERY_SECONDS)
    return sorted(worst.values()), ended


def main() -> None:
    """Entry point."""
    numbers = [int(each) for each in sys.argv[1:]]
    members, seconds = (*numbers, 64)[0], float(numbers[1]) if len(numbers) > 1 else 30.0
    children: list[int] = []
    with running_cluster(shards=1, workers=0, coordinator_options=("--lease-seconds", "600")) as cluster:
        try:
            for _ in range(members):
                child = os.fork()
                if not child:
                    try:
                        busy_member(cluster.address)
                    finally:
                        os._exit(1)
                children.append(child)
            found, ended = silences(cluster.address, members, seconds)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    print(
        f"{members} members on {len(os.sched_getaffinity(0))} cores: silent at most {statistics.median(found):.1f} s "
        f"(median), {found[int(0.9 * len(found))]:.1f} s (9 of 10), {found[-1]:.1f} s (longest); "
        f"{sum(each > 5 for each in found)} above 5 s, {sum(each > 20 for each in found)} above 20 s; "
        f"{ended} leases of 600 s ended"
    )


if __name__ == "__main__":
    main()
