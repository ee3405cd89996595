"""Carries out the commands of the supervisor: starts, reads, signals and reaps processes."""

from __future__ import annotations

import selectors
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, assert_never
from urllib.parse import urlsplit

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.worker_requests import LostServer, Wanted, WorkerRequests
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_protocol.errors import PsError
from ps_protocol.files import OwnFolder, open_private
from ps_protocol.launch.commands import SHARD
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF, Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.cli.launcher.events import (
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
from ps_server.cli.launcher.job_folder import RUN_FOLDERS, JobFolder
from ps_server.cli.launcher.machines import JobProcess, Machines, ThisMachine
from ps_server.cli.launcher.programs import (
    ASKS_FOR_WORKERS,
    ASKS_LAUNCHER,
    CERTIFICATES,
    Programs,
    certificates_in,
    security_environment,
)
from ps_server.cli.launcher.screen import Folders, Screen, silent_workers, summary
from ps_server.cli.launcher.signals import SignalPipe
from ps_server.cli.launcher.supervisor import ENDING, Stage, Supervisor

if TYPE_CHECKING:
    from ps_server.certs import CertificateFolder


#: Exit code of a process that cannot be started, as of a shell.
CANNOT_START = 126


class Runner:
    """Owns the job's processes. ``run`` on the main thread returns when all of them have ended."""

    def __init__(
        self,
        supervisor: Supervisor,
        programs: Programs,
        screen: Screen,
        environment: Mapping[str, str],
        log_dir: Path | None = None,
        show_progress: bool = True,
        job_folder: JobFolder | None = None,
        machines: Machines | None = None,
        requests: WorkerRequests | None = None,
    ) -> None:
        """``machines``: where processes are started; None: on this machine, with ``job_folder`` as the job's own.

        ``requests``: asked from the start, where the coordinator's address is known then. Closed with the job.
        """
        self._supervisor = supervisor
        self._screen = screen
        self._environment = environment
        self._log_dir = log_dir
        self._folder = OwnFolder(RUN_FOLDERS)
        #: None: there is no coordinator to ask, or not yet.
        self._requests = requests
        if supervisor.coordinated:
            asks = ASKS_LAUNCHER if machines is None else ASKS_FOR_WORKERS
            programs = replace(programs, coordinator_settings={**programs.coordinator_settings, "engine": asks})
        self._programs = programs
        forks = programs.forks_shards and programs.servers[1] == SHARD
        self._machine = ThisMachine(job_folder, forks=forks, say=screen.say)
        self._machines: Machines = machines or self._machine
        self._progress_seconds = (0.5 if screen.interactive else 2.0) if show_progress else None
        self._children: dict[ProcessName, JobProcess] = {}
        self._logs: dict[ProcessName, BinaryIO] = {}
        #: Processes that were to be started and could not be.
        self._unstarted: list[Exited] = []
        self._selector = selectors.DefaultSelector()
        self._coordinator = ""
        self._poller: ProgressPoller | None = None
        self._code: int | None = None
        #: Of this job alone; None: those that the environment names.
        self._certificates: CertificateFolder | None = None
        self._security = OFF
        #: The status before the servers were stopped.
        self._final: ClusterStatus | None = None
        self._looked = False
        self._begin = time.monotonic()
        self._next_progress = 0.0

    def run(self) -> int:
        """Run the job to its end; returns ps-run's exit code."""
        with ExitStack() as stack:
            stack.callback(self._close)
            stack.enter_context(self._folder)
            self._secure()
            signals = stack.enter_context(SignalPipe())
            self._selector.register(signals.fd, selectors.EVENT_READ)
            self._begin = time.monotonic()
            self._do(self._supervisor.start(time.monotonic()))
            while self._code is None:
                self._read(self._timeout())
                for event in self._events(signals):
                    self._do(self._supervisor.handle(event, time.monotonic()))
                self._show_progress()
            return self._code

    def _secure(self) -> None:
        """Make certificates and tokens where the job is to have its own; those of the environment count else."""
        if self._programs.tls:
            kept = self._programs.storage.data_dir if self._programs.keeps_state else None
            path, names = (kept or self._folder.path) / CERTIFICATES, self._machines.names
            self._certificates = certificates_in(path, self._programs.shards, names, self._programs.job)
            settings = self._certificates.settings(AccessRole.ADMIN.value, role=AccessRole.ADMIN)
            self._screen.say(f"certificates and tokens of this job are in {self._certificates.path}")
        else:
            settings = SecuritySettings.from_environment(self._environment)
        self._security = Security(settings, AccessRole.ADMIN)

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartProcess(process):
                    self._start(process)
                case Send(process, signum):
                    # Not where one alone is killed, or ended.
                    if process.part in SERVERS and self._supervisor.stage in ENDING:
                        self._look_last()
                        if process.part is ProcessRole.SHARD:  # none is started any more
                            self._machine.end_forks()
                    # It may have ended meanwhile.
                    if (child := self._children.get(process)) is not None:
                        child.send(signum)
                case Say(text):
                    self._screen.say(text)
                case Finish(code):
                    self._conclude(code)
                    self._code = code
                case _:
                    assert_never(command)

    def _start(self, process: ProcessName) -> None:
        try:
            if self._certificates is not None and process.part is ProcessRole.SHARD:
                self._certificates.have_shard(process.index, self._machines.names)
            child = self._machines.start(
                process,
                self._programs.command(process, self._coordinator),
                self._programs.environment(process, self._coordinator, self._environment),
                security_environment(process, self._certificates),
                self._log_of(process),
            )
        except OSError as error:
            # No memory, process or descriptor is left.
            self._unstarted.append(Exited(process, CANNOT_START, why=f"cannot be started: {error.strerror or error}"))
            return
        self._children[process] = child
        self._selector.register(child.output, selectors.EVENT_READ, child)

    def _log_of(self, process: ProcessName) -> BinaryIO | None:
        if self._log_dir is not None and process not in self._logs:
            path = self._log_dir / f"{process}.log".replace(" ", "-")
            self._logs[process] = open_private(path, buffering=0)
        return self._logs.get(process)

    def _timeout(self) -> float:
        """Seconds until the next timeout."""
        now = time.monotonic()
        due = [0.0 if self._unstarted else 1.0]
        if self._machines.look() or self._supervisor.stage is Stage.STARTING:
            due.append(0.02)
        if self._supervisor.deadline is not None:
            due.append(self._supervisor.deadline - now)
        if self._poller is not None and self._supervisor.stage not in ENDING:
            due.append(self._next_progress - now)
        return max(0.0, min(due))

    def _read(self, timeout_seconds: float) -> None:
        for key, _ in self._selector.select(timeout_seconds):
            child = key.data
            if child is None:
                continue
            lines = child.read()
            if lines is None:
                self._selector.unregister(child.output)
            else:
                self._screen.show(child.name, lines)

    def _events(self, signals: SignalPipe) -> list[Event]:
        events: list[Event] = [Interrupted(signum) for signum in signals.read()]
        if self._screen.broken:
            self._screen.broken = False
            events.append(Interrupted(signal.SIGPIPE))
        if self._supervisor.stage is Stage.STARTING and (address := self._machines.coordinator()):
            self._coordinator = address
            summary = self._programs.summary(goes_on=self._machines.goes_on)
            self._screen.say(f"coordinator at {self._coordinator}: {summary}")
            self._show_page()
            self._show_metrics()
            self._start_asking()
            if self._machines.goes_on:
                events += self._kept_order()
            events.append(CoordinatorReady())
        for child in list(self._children.values()):
            if (code := child.poll()) is not None:
                self._forget(child)
                events.append(Exited(child.name, code, child.peak_bytes, child.why))
                if self._requests is not None:  # whether others train on
                    self._requests.ask_now()
            elif why := child.hangs():
                events.append(ServerHangs(child.name, why))
        events += self._unstarted
        self._unstarted = []
        deadline = self._supervisor.deadline
        if deadline is not None and deadline <= time.monotonic():
            events.append(DeadlinePassed())
        wanted = self._requests.take() if self._requests is not None else Wanted()
        if wanted.ranks:
            events.append(WorkersWanted(wanted.ranks))
        events += filter(None, map(self._hanging, wanted.lost))
        if wanted.error is not None:
            self._screen.say(f"processes that hang are not noticed, and the job cannot be scaled: {wanted.error}")
            events.append(CannotAsk())
        if wanted.order is not None:
            events.append(Scaled(wanted.order))
        return events

    def _kept_order(self) -> list[Event]:
        """What the job is to have, of the coordinator's journal: it counts before the first process is started."""
        try:
            with CoordinatorClient(self._coordinator, self._security) as client:
                return [Scaled(client.get_order(times.BRIEF_CALL_SECONDS))]
        except PsError as error:
            self._screen.say(f"how many workers and shards the job had is not known: {error.message}")
            return []

    def _hanging(self, lost: LostServer) -> ServerHangs | None:
        """The event of a lost server whose process lives and is a child of this program; None: it is not."""
        child = self._children.get(ProcessName(ProcessRole.SHARD, lost.index)) if lost.role is Role.SHARD else None
        if child is None or child.pid != lost.pid:
            return None
        return ServerHangs(child.name, f"the coordinator has lost it, for {lost.how}", lost.replaced)

    def _forget(self, child: JobProcess) -> None:
        del self._children[child.name]
        if child.output in self._selector.get_map():
            self._selector.unregister(child.output)
        self._screen.show(child.name, child.read_rest())

    def _show_page(self) -> None:
        """Print the address of the page; a coordinator that is started again serves it there."""
        if self._programs.page_port is None:
            return
        try:
            with CoordinatorClient(self._coordinator, self._security) as client:
                url = client.get_history(times.BRIEF_CALL_SECONDS, last_points=1).configuration["page"]
        except PsError as error:
            self._screen.say(f"the address of the page is not known: {error.message}")
            return
        self._programs = replace(self._programs, page_port=urlsplit(url).port)
        self._screen.say(f"page at {url}")
        if self._certificates is not None:
            token, authority = self._certificates.path / "viewer.token", self._certificates.authority_file
            self._screen.say(f"the page asks for the token in {token}; have the browser trust {authority}")

    def _show_metrics(self) -> None:
        """Print where Prometheus finds every process of the job."""
        if self._programs.metrics_port is None:
            return
        try:
            with CoordinatorClient(self._coordinator, self._security) as client:
                url = client.get_status(times.BRIEF_CALL_SECONDS, once=True).metrics_url
        except PsError as error:
            self._screen.say(f"the address of the metrics is not known: {error.message}", event="metrics")
            return
        targets = url.removesuffix("metrics") + "targets"
        self._screen.say(f"metrics at {url}; {targets} lists every process", event="metrics")

    def _start_asking(self) -> None:
        """Ask the coordinator, which serves now, for its status and for what it requests."""
        if self._progress_seconds is not None:
            self._poller = ProgressPoller(self._coordinator, self._progress_seconds, self._security)
        if self._requests is None:
            self._requests = WorkerRequests(self._coordinator, self._security)

    def _show_progress(self) -> None:
        now = time.monotonic()
        if self._poller is None or self._progress_seconds is None or now < self._next_progress:
            return
        # While the job ends, the last message is the reason.
        if self._supervisor.stage in ENDING:
            return
        self._next_progress = now + self._progress_seconds
        if (status := self._poller.latest) is not None:
            self._screen.progress(status, now - self._begin)

    def _look_last(self) -> None:
        """Get the final status before the first server is stopped."""
        if self._looked:
            return
        self._looked = True
        if not self._coordinator:  # it has not served
            return
        with suppress(PsError), CoordinatorClient(self._coordinator, self._security) as client:
            self._final = client.get_status(times.BRIEF_CALL_SECONDS, once=True)

    def _conclude(self, code: int) -> None:
        """Show the summary of the job; nothing for a job that did not start, whose reason was shown."""
        if not self._looked:
            return
        programs, status = self._programs, self._final or (self._poller.latest if self._poller else None)
        folders = Folders(
            _newest_checkpoint(programs.checkpoints.directory),
            self._supervisor.unsaved,
            programs.storage.data_dir if programs.keeps_state else None,
            self._log_dir,
        )
        words = silent_workers(status, programs.workers) if code == 0 else []
        words += summary(code, time.monotonic() - self._begin, status, self._supervisor.failures, folders)
        for text in words:
            self._screen.say(text)

    def _close(self) -> None:
        for child in self._children.values():
            child.kill()
        self._machine.close()
        if self._poller is not None:
            self._poller.close()
        if self._requests is not None:
            self._requests.close()
        self._screen.close()
        self._selector.close()
        for log in self._logs.values():
            log.close()


def _newest_checkpoint(directory: Path | None) -> Path | None:
    if directory is None:
        return None
    from ps_server.checkpoint.directory import latest  # what reads checkpoints takes its time to import

    return latest(directory)


class ProgressPoller:
    """A daemon thread that keeps the newest status. Any thread may read ``latest``; a coordinator that does not
    answer leaves the last one standing.
    """

    def __init__(self, address: str, interval_seconds: float, security: Security = OFF) -> None:
        self._client = CoordinatorClient(address, security)
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        #: The last answer, None before the first.
        self.latest: ClusterStatus | None = None
        self._thread = threading.Thread(target=self._poll, name="ps-progress", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            try:
                self.latest = self._client.get_status(times.BRIEF_CALL_SECONDS)
            except PsError:
                continue

    def close(self) -> None:
        """End the thread; a call in progress is cancelled."""
        self._closed.set()
        self._client.close()
        self._thread.join()
