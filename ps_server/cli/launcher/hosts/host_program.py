"""What ps-run starts on each host over ssh: starts, reads, signals and reaps the processes of the job there.

It ends, and with it every process that it started, when its standard input closes, when ps-run is silent for a while,
and at SIGTERM, SIGHUP and SIGINT. If it is killed, the kernel ends its children.
"""

from __future__ import annotations

import os
import select
import sys
import time
from base64 import urlsafe_b64encode
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from ps_protocol import times
from ps_protocol.errors import ConfigError, PsError, StorageFull
from ps_protocol.files import OwnFolder, open_private
from ps_protocol.launch.child import Child
from ps_server.checkpoint.files import check_writable
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.messages import (
    BEGINNING,
    Alive,
    Begin,
    Declined,
    Ended,
    FrameReader,
    Hangs,
    Hello,
    Launch,
    Message,
    Printed,
    Ready,
    SendSignal,
    Serving,
    Started,
    pack,
    unpack,
)
from ps_server.cli.launcher.job_folder import RUN_FOLDERS, JobFolder
from ps_server.cli.launcher.machines import ThisMachine
from ps_server.cli.launcher.signals import SignalPipe

MAX_WAITING_BYTES = 1 << 20
"""With more than this to be sent, it reads no more of what its processes write: they wait."""

_READ_BYTES = 1 << 16


class HostProgram:
    """Owns this host's processes of one job. One thread; ``run`` returns when all of them have ended."""

    def __init__(self, commands: int, answers: int) -> None:
        """``commands`` and ``answers``: descriptors of the connection to ps-run."""
        self._commands, self._answers = commands, answers
        for descriptor in (commands, answers):
            os.set_blocking(descriptor, False)
        self._reader = FrameReader()
        self._waiting = bytearray(BEGINNING)
        self._children: dict[ProcessName, Child] = {}
        #: Children whose output has ended.
        self._quiet: set[ProcessName] = set()
        #: Children that hang, and that ps-run knows of.
        self._hanging: set[ProcessName] = set()
        self._folder = Path()
        self._machine = ThisMachine()
        self._starts_coordinator = False
        self._silence_seconds = times.PATIENCE_SECONDS
        self._heard = self._spoke = time.monotonic()
        self._gone = ""

    def run(self) -> str:
        """Serve ps-run until it is gone; returns why."""
        with ExitStack() as stack:
            self._folder = stack.enter_context(OwnFolder(RUN_FOLDERS)).path
            stack.callback(self._kill)
            signals = stack.enter_context(SignalPipe())
            self._send(Hello(version("torch-ps")))
            while not self._gone:
                self._wait(signals)
                self._write()
                self._read_commands()
                self._read_children()
                self._look()
                if received := signals.read():
                    self._gone = f"received {received[0].name}"
        return self._gone

    def _wait(self, signals: SignalPipe) -> None:
        poll = select.poll()
        poll.register(self._commands, select.POLLIN)
        poll.register(signals.fd, select.POLLIN)
        if self._waiting:
            poll.register(self._answers, select.POLLOUT)
        if len(self._waiting) < MAX_WAITING_BYTES:
            for name, child in self._children.items():
                if name not in self._quiet:
                    poll.register(child.output, select.POLLIN)
        seconds = 0.02 if self._starts_coordinator else 1.0
        poll.poll(min(seconds, self._silence_seconds / 4) * 1000)

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._answers, self._waiting[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except OSError as error:
            self._gone = f"the connection to ps-run is closed: {error.strerror}"

    def _read_commands(self) -> None:
        try:
            data = os.read(self._commands, _READ_BYTES)
        except BlockingIOError:
            data = None
        if data == b"":
            self._gone = "ps-run has closed the connection"
        elif data:
            self._heard = time.monotonic()
            for fields, payload in self._reader.feed(data):
                self._handle(unpack(fields, payload))
        elif time.monotonic() - self._heard > self._silence_seconds:
            self._gone = f"no message from ps-run for {self._silence_seconds:g} s"

    def _handle(self, message: Message) -> None:
        match message:
            case Begin():
                try:
                    self._send(self._begin(message))
                except (ConfigError, StorageFull) as error:
                    self._send(Declined(error.message, error.expected, error.actual, error.remedy))
            case Launch():
                self._launch(message)
            case SendSignal(process, signum):
                if (child := self._children.get(process)) is not None:
                    child.send(signum)
            case _:
                pass

    def _begin(self, begin: Begin) -> Ready:
        """Raises ConfigError, StorageFull where this host cannot take part."""
        self._silence_seconds = begin.silence_seconds
        try:
            os.chdir(begin.working_folder)
        except OSError as error:
            raise ConfigError(
                f"the folder {begin.working_folder} cannot be entered: {error.strerror}",
                remedy="call ps-run in a folder that every host has: on a shared disk, or a copy at the same path",
            ) from error
        if begin.script and not Path(begin.script).is_file():
            raise ConfigError(
                f"no such script: '{begin.script}' (in {begin.working_folder})",
                remedy="copy it there, or put it on a disk that the hosts share",
            )
        if begin.data_dir:
            job_folder = JobFolder(Path(begin.data_dir), lock_name=begin.lock_name)
            self._machine = ThisMachine(job_folder)
        if begin.checkpoint_dir:
            check_writable(Path(begin.checkpoint_dir))
        addresses = (os.environ.get("SSH_CONNECTION") or "").split()
        client, server = (addresses[0], addresses[2]) if len(addresses) == 4 else ("", "")
        return Ready(
            len(os.sched_getaffinity(0)),
            client,
            server,
            self._machine.goes_on,
            str(Path(begin.data_dir).resolve()) if begin.data_dir else "",
        )

    def _launch(self, launch: Launch) -> None:
        name = launch.process
        try:
            files = {variable: str(self._file(variable, data, name)) for variable, data in launch.files.items()}
            child = self._machine.start(name, launch.command, {**os.environ, **launch.environment}, files, None)
            self._starts_coordinator |= name.part is ProcessRole.COORDINATOR
            self._children[name] = child
            self._send(Started(name, child.pid or 0))
        except OSError as error:
            self._send(Printed(name, f"cannot be started: {error.strerror}\n".encode()))
            self._send(Ended(name, 126, 0))

    def _file(self, variable: str, data: bytes, process: ProcessName) -> Path:
        # Names of variables are not taken for names of files.
        path = self._folder / urlsafe_b64encode(f"{process} {variable}".encode()).decode()
        with open_private(path) as file:
            file.write(data)
        return path

    def _read_children(self) -> None:
        for name, child in list(self._children.items()):
            if name not in self._quiet and len(self._waiting) < MAX_WAITING_BYTES:
                self._pass_on(child)
            if (code := child.poll()) is not None:
                while self._pass_on(child):
                    pass
                child.read_rest()
                del self._children[name]
                self._quiet.discard(name)
                self._hanging.discard(name)
                self._send(Ended(name, code, child.peak_bytes))
            elif (why := child.hangs()) and name not in self._hanging:
                self._hanging.add(name)
                self._send(Hangs(name, why))

    def _pass_on(self, child: Child) -> bool:
        data = child.read_bytes()
        if data is None:
            return False
        self._send(Printed(child.name, data))
        return True

    def _look(self) -> None:
        """Report when the coordinator serves, and that this side is there."""
        if self._starts_coordinator and (address := self._machine.coordinator()):
            self._starts_coordinator = False
            self._send(Serving(address))
        if time.monotonic() - self._spoke > self._silence_seconds / 4:
            self._send(Alive())

    def _send(self, message: Message) -> None:
        self._spoke = time.monotonic()
        self._waiting += pack(message)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()


def main() -> None:
    """The program: its standard input and output are the connection; nothing else may write there."""
    commands, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        HostProgram(commands, answers).run()
    except PsError as error:
        sys.exit(f"ps-run's program on this host ends: {error}")


if __name__ == "__main__":
    main()
