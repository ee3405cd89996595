"""Decides which processes are killed because they live and do nothing: workers and servers. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from ps_protocol.client.worker_requests import JOINING_SECONDS
from ps_protocol.launch.restarts import Restarts
from ps_server.cli.launcher.events import Command, ProcessName, ProcessRole, Say, Send, ServerHangs


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
            spent = spent if restarts.total else "without --restart-workers it is not started again"
            commands.append(Say(f"{process} is lost to the coordinator, and {spent}"))
        elif restarts.age(process, now) >= JOINING_SECONDS:
            ends[id(restarts)] += 1
            text = f"{process} runs and is lost to the coordinator; it is killed"
            commands += [Say(text), Send(process, signal.SIGKILL)]
    return commands


class HangingServers:
    """Servers that are killed because they hang. What follows their end is what follows any loss of a server, whether
    it is started again or not: a server that hangs is of no use.
    """

    def __init__(self) -> None:
        #: Those that were killed and have not ended yet.
        self._killed: dict[ProcessName, ServerHangs] = {}

    def end(self, event: ServerHangs, live: Collection[ProcessName]) -> list[Command]:
        """Kill it, once, if it is ``live``. It may be stopped, so no other signal ends it."""
        process = event.process
        if process not in live or process in self._killed:
            return []
        self._killed[process] = event
        return [Say(f"{process} hangs: {event.why}; it is killed"), Send(process, signal.SIGKILL)]

    def ended(self, process: ProcessName) -> ServerHangs | None:
        """Why ``process``, which has ended, was killed here; None: it was not."""
        return self._killed.pop(process, None)
