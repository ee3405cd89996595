"""Decides which processes of a job are started, signalled and restarted, and its exit code. Pure."""

from __future__ import annotations

import enum
import math
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ps_protocol import times as shared
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.launch.restarts import Restarts
from ps_server.cli.launcher import times
from ps_server.cli.launcher.events import (
    SCRIPTS,
    SERVERS,
    CannotAsk,
    Command,
    CoordinatorReady,
    DeadlinePassed,
    Event,
    Exited,
    Finish,
    Interrupted,
    ProcessName,
    ProcessRole,
    Say,
    Scaled,
    Send,
    ServerHangs,
    StartProcess,
    WorkersWanted,
)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The number of processes of each kind, and the limits of restarts."""

    shards: int
    workers: int
    evaluators: int = 0
    #: Limit of restarts of failed workers, in total.
    worker_restarts: int = 0
    #: Limit of restarts of a coordinator or shards that end too early, in total.
    server_restarts: int = 0
    #: The coordinator writes a last checkpoint, for which it needs the shards.
    saves: bool = False
    #: There is a coordinator, which comes first; without one there are workers alone.
    coordinated: bool = True
    #: Workers come and go; the job ends when the coordinator reports that all have left after training.
    elastic: bool = False

    def members(self) -> list[ProcessName]:
        """Every process except the coordinator, shards first."""
        counts = (
            (ProcessRole.SHARD, self.shards),
            (ProcessRole.WORKER, self.workers),
            (ProcessRole.EVALUATOR, self.evaluators),
        )
        return [ProcessName(part, index) for part, count in counts for index in range(count)]


class Stage(enum.Enum):
    """The stage of the job; it only advances."""

    STARTING = "waiting for the coordinator"
    RUNNING = "workers run"
    EVALUATING = "workers are done, evaluators finish"
    LEAVING = "workers and evaluators end"
    SAVING = "the coordinator ends, after a last checkpoint"
    STOPPING = "shards end"
    CLOSING = "the coordinator ends"
    FINISHED = "nothing lives"


ENDING = frozenset({Stage.LEAVING, Stage.SAVING, Stage.STOPPING, Stage.CLOSING})


def describe_exit(code: int, peak_bytes: int = 0) -> str:
    """How a process ended, in words; for one killed by SIGKILL with its peak memory."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was killed by signal {-code}"
    why = f": perhaps out of memory, its peak was {peak_bytes / 1e9:.2f} GB" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{why if peak_bytes else ''})"


def shell_code(code: int) -> int:
    """A process's end as a shell reports it: 128 + signal."""
    return code if code >= 0 else 128 - code


class Supervisor(ABC):
    """The state of processes that one program runs. Called by the runner's one thread; does no I/O. Every live process
    was named by a StartProcess and has not been named by an Exited; Finish comes exactly once, when none is left.
    """

    #: Whether it starts a coordinator, before all others.
    coordinated = False
    #: At the end of a job that saves: whether its last checkpoint was not written.
    unsaved = False

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        #: Unexpected ends of processes, in order.
        self.failures: list[str] = []
        self._live: set[ProcessName] = set()
        #: Processes that wait for their restart, and until when.
        self._pausing: dict[ProcessName, float] = {}
        #: Servers that were killed because they hang, until they have ended.
        self._killed: dict[ProcessName, ServerHangs] = {}
        self._stage_ends: float | None = None
        self._exit_code: int | None = None

    @property
    def deadline(self) -> float | None:
        """When to call with DeadlinePassed, in the seconds of ``now``; None: nothing is due."""
        due = [*self._pausing.values(), *([] if self._stage_ends is None else [self._stage_ends])]
        return min(due, default=None)

    @abstractmethod
    def start(self, now: float) -> list[Command]:
        """The first commands."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands for ``event``, in order."""
        match event:
            case Exited():
                return self._on_exit(event, now)
            case Interrupted(signum):
                return self._on_interrupt(signum, now)
            case DeadlinePassed():
                return self._on_deadline(now)
            case WorkersWanted(ranks):
                return self._on_workers_wanted(ranks, now) if self.stage is Stage.RUNNING else []
            case ServerHangs():
                return [] if self.stage in ENDING else self._on_server_hangs(event)
            case _:
                return []

    @abstractmethod
    def _restarts(self, process: ProcessName) -> Restarts:
        """The restarts that ``process`` uses."""

    @abstractmethod
    def _on_exit(self, event: Exited, now: float) -> list[Command]: ...

    @abstractmethod
    def _on_stage_end(self, now: float) -> list[Command]:
        """The time of this stage is over."""

    @abstractmethod
    def _words_of_interrupt(self, signum: signal.Signals) -> tuple[str, float]:
        """The message for the first ``signum``, and how long scripts have to end."""

    @abstractmethod
    def _advance(self, now: float) -> list[Command]:
        """Advance to the next stage when this one is complete."""

    def _start(self, process: ProcessName, now: float) -> StartProcess:
        self._live.add(process)
        self._restarts(process).started(process, now)
        return StartProcess(process)

    def _again(self, process: ProcessName, how: str, now: float) -> list[Command]:
        """Restart ``process``, now or later; nothing when no restarts are left."""
        restarts = self._restarts(process)
        pause_seconds = restarts.take(process, now)
        if pause_seconds is None:
            return []
        when = f" in {pause_seconds:g} s" if pause_seconds else ""
        say = Say(f"{how}; starting it again{when} (restart {restarts.used} of {restarts.total})")
        if pause_seconds:
            self._pausing[process] = now + pause_seconds
            return [say]
        return [say, self._start(process, now)]

    def _on_workers_wanted(self, ranks: Iterable[int], now: float) -> list[Command]:
        """Kill the workers of ``ranks`` that run here, as far as restarts are left for them."""
        commands: list[Command] = []
        #: By the restarts that they will use: some share them.
        ends: Counter[int] = Counter()
        for process in (ProcessName(ProcessRole.WORKER, rank) for rank in ranks):
            if process not in self._live:
                continue
            restarts = self._restarts(process)
            if restarts.used + ends[id(restarts)] >= restarts.total:
                spent = f"--restart-workers {restarts.total} is used up"
                spent = spent if restarts.total else "without --restart-workers it is not started again"
                commands.append(Say(f"{process} is lost to the coordinator, and {spent}"))
            elif restarts.age(process, now) >= shared.JOINING_SECONDS:
                ends[id(restarts)] += 1
                text = f"{process} runs and is lost to the coordinator; it is killed"
                commands += [Say(text), Send(process, signal.SIGKILL)]
        return commands

    def _on_server_hangs(self, event: ServerHangs) -> list[Command]:
        """Kill a live server that hangs, once; its end is handled as any loss of a server.

        It may be stopped, so no other signal ends it.
        """
        process = event.process
        if process not in self._live or process in self._killed:
            return []
        self._killed[process] = event
        return [Say(f"{process} hangs: {event.why}; it is killed"), Send(process, signal.SIGKILL)]

    def _on_interrupt(self, signum: signal.Signals, now: float) -> list[Command]:
        if self.stage in ENDING:
            # Only a second Ctrl-C kills: a closing terminal sends SIGHUP more than once.
            return self._signal(signal.SIGKILL, *ProcessRole) if signum is signal.SIGINT else []
        text, grace_seconds = self._words_of_interrupt(signum)
        kind = signal.SIGINT if signum is signal.SIGINT else signal.SIGTERM
        return self._end(128 + signum, text, now, kind, grace_seconds)

    def _on_deadline(self, now: float) -> list[Command]:
        paused = sorted((process for process, due in self._pausing.items() if due <= now), key=str)
        for process in paused:
            del self._pausing[process]
        commands: list[Command] = [self._start(process, now) for process in paused]
        if self._stage_ends is not None and self._stage_ends <= now:
            self._stage_ends = None
            commands += self._on_stage_end(now)
        return commands

    def _end(
        self,
        code: int,
        text: str,
        now: float,
        signum: signal.Signals = signal.SIGTERM,
        grace_seconds: float = times.GRACE_SECONDS,
    ) -> list[Command]:
        """End the scripts; ``code`` is the exit code of the job."""
        self._exit_code = code
        self._pausing.clear()
        self.stage, self._stage_ends = Stage.LEAVING, now + grace_seconds
        return [Say(text), *self._signal(signum, *SCRIPTS), *self._advance(now)]

    def _finish(self) -> list[Command]:
        self.stage, self._stage_ends = Stage.FINISHED, None
        return [Finish(self._exit_code or 0)]

    def _signal(self, signum: signal.Signals, *parts: ProcessRole) -> list[Command]:
        chosen = (process for process in self._live if process.part in parts)
        return [Send(process, signum) for process in sorted(chosen, key=str)]


def how_it_ended(event: Exited, hung: ServerHangs | None) -> str:
    """How the process of ``event`` ended, in words. ``hung``: why it was killed here; None: it was not."""
    how = "hung and was killed" if hung else event.why or describe_exit(event.code, event.peak_bytes)
    return f"{event.process} {how}"


class JobSupervisor(Supervisor):
    """A whole job: the coordinator first, then all others; servers end last."""

    def __init__(self, plan: JobPlan) -> None:
        super().__init__(Stage.STARTING)
        self.coordinated = plan.coordinated
        self._plan = plan
        self._server_restarts = Restarts(plan.server_restarts)
        self._worker_restarts = Restarts(plan.worker_restarts)
        #: Processes that end because the job is to have fewer, and when they are killed.
        self._leaving: dict[ProcessName, float] = {}
        #: Workers that have ended with code 0 since the job was scaled last, and are not started again.
        self._done: set[ProcessName] = set()
        self._order = ScaleOrder()
        #: A worker has ended since ``_order`` came.
        self._order_is_old = False
        #: The coordinator can be asked; else the job ends with the workers of this program.
        self._asks = True
        self._start_is_late = False
        self.unsaved = plan.saves

    @property
    def deadline(self) -> float | None:
        """As of every supervisor."""
        due = [*self._leaving.values(), *([] if (first := super().deadline) is None else [first])]
        return min(due, default=None)

    def start(self, now: float) -> list[Command]:
        """Start the coordinator, or all others where there is none."""
        if not self._plan.coordinated:
            return self._on_ready(now)
        self._stage_ends = now + times.LATE_START_SECONDS
        return [self._start(ProcessName(ProcessRole.COORDINATOR), now)]

    def handle(self, event: Event, now: float) -> list[Command]:
        """As of every supervisor."""
        match event:
            case CoordinatorReady():
                return self._on_ready(now)
            case Scaled(order):
                return self._on_scaled(order, now)
            case CannotAsk():
                self._asks = False
                return self._advance(now) if self._done else []
            case _:
                return super().handle(event, now)

    def _restarts(self, process: ProcessName) -> Restarts:
        return self._server_restarts if process.part in SERVERS else self._worker_restarts

    def _on_ready(self, now: float) -> list[Command]:
        if self.stage is not Stage.STARTING:
            return []
        self.stage, self._stage_ends = Stage.RUNNING, None
        return [self._start(process, now) for process in self._members()]

    def _members(self) -> list[ProcessName]:
        """Every process except the coordinator: those of the plan, unless the job has another number since."""
        members = self._plan.members()
        for part, numbers in ((ProcessRole.SHARD, self._order.shards), (ProcessRole.WORKER, self._order.ranks)):
            if numbers is not None:
                members = [each for each in members if each.part is not part]
                members += [ProcessName(part, number) for number in sorted(numbers)]
        return sorted(members, key=lambda each: list(ProcessRole).index(each.part))

    def _on_exit(self, event: Exited, now: float) -> list[Command]:
        process, code = event.process, event.code
        self._live.discard(process)
        hung = self._killed.pop(process, None)
        if self.stage is Stage.SAVING and process.part is ProcessRole.COORDINATOR:
            return [*self._on_last_checkpoint(event), *self._advance(now)]
        if self.stage in ENDING:
            return self._advance(now)
        self._order_is_old = self._order_is_old or process.part is ProcessRole.WORKER
        if self._leaving.pop(process, None) is not None:
            return self._advance(now)
        if code == 0 and process.part is ProcessRole.WORKER:
            self._done.add(process)
        how = how_it_ended(event, hung)
        if code or process.part in SERVERS:
            self.failures.append(how)
        if hung is not None and hung.replaced:
            # A new one would be refused, and use up the restarts.
            return [Say(f"{how}; another process serves in its place"), *self._advance(now)]
        if process.part in SERVERS:
            return self._on_lost_server(process, code, how, now)
        if code == 0:
            return self._advance(now)
        if process.part is ProcessRole.EVALUATOR:
            return [Say(f"{how}; training continues without it"), *self._advance(now)]
        return self._again(process, how, now) or self._end(
            shell_code(code), f"{how}{self._spent('--restart-workers', process)}; stopping the job", now
        )

    def _on_last_checkpoint(self, event: Exited) -> list[Command]:
        """The coordinator, which was to have it written, has ended."""
        self.unsaved = event.code != 0
        if not self.unsaved:
            return []
        how = how_it_ended(event, None)
        self.failures.append(how)
        self._exit_code = self._exit_code or shell_code(event.code)
        return [Say(f"{how}: the last checkpoint was not written")]

    def _on_scaled(self, order: ScaleOrder, now: float) -> list[Command]:
        """Start and end processes as ``order`` requests; it comes again and again, the same or not."""
        if self.stage is Stage.STARTING:
            self._order = order
            return []
        if self.stage is not Stage.RUNNING:
            return []
        if order.number != self._order.number:
            self._done.clear()
        self._order, self._order_is_old, self._asks = order, False, True
        commands: list[Command] = []
        if order.ranks is not None:
            taken = {ProcessName(ProcessRole.WORKER, rank) for rank in order.live_ranks} | self._done
            stays = order.ranks | order.done_ranks
            commands += self._change(ProcessRole.WORKER, stays, order.ranks, taken, now)
        if order.shards is not None:
            taken = {ProcessName(ProcessRole.SHARD, number) for number in order.live_shards}
            commands += self._change(ProcessRole.SHARD, order.shards, order.added_shards, taken, now)
        return [*commands, *self._advance(now)]

    def _change(
        self,
        part: ProcessRole,
        stays: Collection[int],
        begun: Collection[int],
        taken: Collection[ProcessName],
        now: float,
    ) -> list[Command]:
        """End the processes of ``part`` that are not in ``stays``, and start those of ``begun`` that are not there.

        ``taken``: numbers that need no process of this program.
        """
        commands: list[Command] = []
        for process in [each for each in self._pausing if each.part is part and each.index not in stays]:
            del self._pausing[process]
        over = [p for p in self._live - self._leaving.keys() if p.part is part and p.index not in stays]
        for process in sorted(over, key=str):
            self._leaving[process] = now + times.SERVER_GRACE_SECONDS
            commands += [Say(f"{process} is ended: the job is to have fewer"), Send(process, signal.SIGTERM)]
        for number in sorted(begun):
            process = ProcessName(part, number)
            if process not in self._live and process not in self._pausing and process not in taken:
                commands += [Say(f"{process} is started: the job is to have more"), self._start(process, now)]
        return commands

    def _on_lost_server(self, process: ProcessName, code: int, how: str, now: float) -> list[Command]:
        spent = ""
        # It failed at its first start: wrong options or damaged data, which a restart does not repair.
        if code <= 0 or not self._server_restarts.never_lived(process, now):
            if commands := self._again(process, how, now):
                return commands
            spent = self._spent("--restart-servers", process)
        return self._end(shell_code(code) or 1, f"{how} before the job was done{spent}; stopping the job", now)

    def _spent(self, flag: str, process: ProcessName) -> str:
        total = self._restarts(process).total
        return f", and {flag} {total} is used up" if total else ""

    def _words_of_interrupt(self, signum: signal.Signals) -> tuple[str, float]:
        if signum is signal.SIGINT:
            text = "interrupted; waiting for the workers to leave (Ctrl-C again kills them)"
            return text, times.INTERRUPT_GRACE_SECONDS
        return f"received {signum.name}; stopping the job", times.GRACE_SECONDS

    def _on_deadline(self, now: float) -> list[Command]:
        late = sorted((process for process, due in self._leaving.items() if due <= now), key=str)
        commands: list[Command] = []
        for process in late:
            self._leaving[process] = math.inf
            text = f"{process}: not ended {times.SERVER_GRACE_SECONDS:.0f} s after it was told to; killed"
            commands += [Say(text), Send(process, signal.SIGKILL)]
        return [*commands, *super()._on_deadline(now)]

    def _on_stage_end(self, now: float) -> list[Command]:
        match self.stage:
            case Stage.STARTING if not self._start_is_late:
                self._start_is_late, self._stage_ends = True, now + shared.STARTS_SECONDS - times.LATE_START_SECONDS
                late, limit = f"{times.LATE_START_SECONDS:.0f}", f"{shared.STARTS_SECONDS:.0f}"
                return [Say(f"the coordinator does not serve after {late} s; waiting for it, {limit} s at most")]
            case Stage.STARTING:
                text = f"the coordinator was not ready within {shared.STARTS_SECONDS:.0f} s; stopping the job"
                return self._end(1, text, now)
            case Stage.EVALUATING:
                late = ", ".join(sorted(str(p) for p in self._live if p.part is ProcessRole.EVALUATOR))
                text = f"{late}: not finished {times.SERVER_GRACE_SECONDS:.0f} s after the last worker; stopping"
                return self._end(0, text, now)
            case Stage.LEAVING:
                return self._signal(signal.SIGKILL, *SCRIPTS)
            case Stage.SAVING:
                text = f"no last checkpoint within {shared.LONG_PATIENCE_SECONDS:.0f} s; killed"
                return [Say(text), *self._signal(signal.SIGKILL, ProcessRole.COORDINATOR)]
            case _:
                late = ", ".join(sorted(map(str, self._live)))
                return [Say(f"{late}: not ended in time; killed"), *self._signal(signal.SIGKILL, *ProcessRole)]

    def _end(
        self,
        code: int,
        text: str,
        now: float,
        signum: signal.Signals = signal.SIGTERM,
        grace_seconds: float = times.GRACE_SECONDS,
    ) -> list[Command]:
        self._leaving.clear()
        return super()._end(code, text, now, signum, grace_seconds)

    def _advance(self, now: float) -> list[Command]:
        """Advance to the next stage when this one is complete. Servers are stopped last."""
        parts = {process.part for process in (*self._live, *self._pausing)}
        if self.stage is Stage.RUNNING and ProcessRole.WORKER not in parts and self._trained:
            self.stage, self._stage_ends = Stage.EVALUATING, now + times.SERVER_GRACE_SECONDS
        if self.stage in (Stage.EVALUATING, Stage.LEAVING) and not parts & SCRIPTS:
            self._pausing.clear()
            if self._plan.saves:
                self.stage, self._stage_ends = Stage.SAVING, now + shared.LONG_PATIENCE_SECONDS
                return [*self._signal(signal.SIGTERM, ProcessRole.COORDINATOR), *self._advance(now)]
            return self._stop_shards(now)
        if self.stage is Stage.SAVING and ProcessRole.COORDINATOR not in parts:
            return self._stop_shards(now)
        # After the shards, so that they can leave.
        if self.stage is Stage.STOPPING and ProcessRole.SHARD not in parts:
            self.stage, self._stage_ends = Stage.CLOSING, now + times.SERVER_GRACE_SECONDS
            return [*self._signal(signal.SIGTERM, ProcessRole.COORDINATOR), *self._advance(now)]
        if self.stage is Stage.CLOSING and not parts:
            return self._finish()
        return []

    @property
    def _trained(self) -> bool:
        """Once no worker of this program runs: whether the job is done. Others may train on in an elastic one."""
        order = self._order
        if not self._plan.elastic or not self._asks:
            return True
        return not self._order_is_old and (order.finished or (bool(self._done) and not order.live_ranks))

    def _stop_shards(self, now: float) -> list[Command]:
        self.stage, self._stage_ends = Stage.STOPPING, now + times.SERVER_GRACE_SECONDS
        return [*self._signal(signal.SIGTERM, ProcessRole.SHARD), *self._advance(now)]
