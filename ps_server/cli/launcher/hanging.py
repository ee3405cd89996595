"""Decides which workers are killed because the coordinator has lost them while their processes live. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from ps_protocol.client.worker_requests import JOINING_SECONDS
from ps_server.cli.launcher.events import Command, ProcessName, ProcessRole, Say, Send
from ps_server.cli.launcher.restarts import Restarts


def end_hanging(
    ranks: Iterable[int], live: Collection[ProcessName], restarts_of: Callable[[ProcessName], Restarts], now: float
) -> list[Command]:
    """Kill the workers of ``ranks`` that are ``live``, as far as they would be started again. Others are told of."""
    commands: list[Command] = []
    #: By the restarts that they will use: some share them.
    ends: Counter[int] = Counter()
    for process in (ProcessName(ProcessRole.WORKER, rank) for rank in ranks):
        if process not in live:
            continue
        restarts = restarts_of(process)
        if restarts.used + ends[id(restarts)] >= restarts.total:
            spent = f"--restart-workers {restarts.total} is used up"
            commands.append(Say(f"{process} is lost to the coordinator, and {spent}"))
        elif restarts.age(process, now) >= JOINING_SECONDS:
            ends[id(restarts)] += 1
            text = f"{process} runs and is lost to the coordinator; it is killed"
            commands += [Say(text), Send(process, signal.SIGKILL)]
    return commands
