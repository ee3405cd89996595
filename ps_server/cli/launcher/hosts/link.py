"""One connection of ssh to a host, the processes behind it, and what a connection that failed means."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import version
from typing import BinaryIO

from ps_protocol.errors import ConfigError, PsError, Unavailable
from ps_protocol.launch import shim
from ps_protocol.launch.child import OutputPipe
from ps_protocol.text import printable
from ps_server.cli.launcher import times
from ps_server.cli.launcher.events import ProcessName
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


class RemoteProcess(OutputPipe):
    """Used by the runner's thread, except what the thread of its connection calls: ``begun``, ``hanging``, ``wrote``
    and ``ended``.
    """

    def __init__(
        self, name: ProcessName, log: BinaryIO | None, send: Callable[[signal.Signals], None], lose: Callable[[], None]
    ) -> None:
        """``send`` sends it a signal; ``lose`` ends the connection to its host, and so the process."""
        super().__init__(log)
        self.name = name
        self.peak_bytes = 0
        #: How it ended, where its exit code does not show it.
        self.why = ""
        #: On its host; None: not known yet.
        self.pid: int | None = None
        self._hangs = ""
        self._code: int | None = None
        self._send, self._lose = send, lose

    def send(self, signum: signal.Signals) -> None:
        """As of a child."""
        self._send(signum)

    def poll(self) -> int | None:
        """As of a child."""
        return self._code

    def hangs(self) -> str:
        """As of a child; its host sees that."""
        return self._hangs

    def kill(self) -> None:
        """End its host's part of the job. The connection waits for the end."""
        self._lose()
        os.close(self.output)

    def wrote(self, data: bytes) -> None:
        """It printed ``data``; returns when the runner has room for it."""
        view = memoryview(data)
        with suppress(OSError):  # the runner has gone
            while view:
                view = view[os.write(self._write_end, view) :]

    def begun(self, pid: int) -> None:
        """Its host has started it, with this number."""
        self.pid = pid

    def hanging(self, why: str) -> None:
        """Its host reports that it hangs."""
        self._hangs = why

    def ended(self, code: int, peak_bytes: int = 0, why: str = "") -> None:
        """It has ended; nothing comes after this."""
        self.peak_bytes, self.why = peak_bytes, why
        # Before the end of the pipe, which wakes the runner.
        self._code = code
        os.close(self._write_end)


SSH_FAILED = 255
"""The exit code of ssh for a failure of its own."""

_TAIL_CHARACTERS = 600

_SSH_REMEDIES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "find out why its key changed; ssh-keygen -R removes the old one"),
    ("Host key verification failed", "check the host's key, and add it to known_hosts by one ssh to it by hand"),
    ("Permission denied", "let this user log in with a key that asks for no password (ssh-copy-id, ssh-agent)"),
    ("Could not resolve hostname", "correct the name, or give it an entry in ~/.ssh/config"),
)
"""What ssh prints where a setting has to change; every other failure may pass."""


def failure(host: str, python: str, code: int | None, printed: str) -> PsError:
    """Why there is no program of ps-run on ``host``: ``code`` is the exit code of ssh, ``printed`` what it wrote.

    ``code`` None: it was ended, because nothing came.
    """
    words = " / ".join(printable(line) for line in printed.strip()[-_TAIL_CHARACTERS:].splitlines())
    if code is None:
        return Unavailable(
            f"{host}: no answer over ssh", actual=words, remedy="see whether ssh reaches it, or give --ssh its options"
        )
    if code == SSH_FAILED:
        for sign, remedy in _SSH_REMEDIES:
            if sign in printed:
                return ConfigError(f"{host}: ssh failed", actual=words, remedy=remedy)
        return Unavailable(
            f"{host}: ssh failed",
            actual=words or f"exit code {code}",
            remedy="see whether its sshd runs and is reached; --ssh 'ssh -p 2222' gives options",
        )
    if code in (126, 127):
        return ConfigError(
            f"{host}: no interpreter {python}", actual=words, remedy="name the one of that host with --python"
        )
    if "ModuleNotFoundError" in printed or "No module named" in printed:
        return ConfigError(
            f"{host}: torch-ps is not installed for {python}, or is another version",
            actual=words,
            remedy="install the same torch-ps[server] there, or name its interpreter with --python",
        )
    return ConfigError(
        f"{host}: ps-run's program ended with code {code}",
        actual=words,
        remedy=f"try it by hand: ssh {host} {python} -m ps_server.cli.launcher.hosts.host_program < /dev/null",
    )


def other_version(host: str, theirs: str, ours: str) -> PsError:
    """``host`` has another torch-ps."""
    return ConfigError(
        f"{host} has another version of torch-ps",
        expected=ours,
        actual=printable(theirs),
        remedy="install the same version on every host",
    )


_READ_BYTES = 1 << 16
_MOST_PRINTED_BYTES = 1 << 14


class HostLink:
    """Made, written to and closed by the runner's thread, with whose end ssh ends; a thread of its own reads.

    It fails as a whole: then every process that it has started counts as ended.
    """

    def __init__(self, command: Sequence[str], python: str, begin: Begin) -> None:
        """Start ``command``, which runs the host's program. ``python`` is for messages alone."""
        self._begin, self._python = begin, python
        #: Of the host, once it can start processes. Its exception is a PsError.
        self.ready: Future[Ready] = Future()
        #: host:port of the coordinator, once it serves there; it is empty from a new start to then.
        self.coordinator = ""
        self._processes: dict[ProcessName, RemoteProcess] = {}
        #: Messages for after Ready; None: it is ready.
        self._held: list[bytes] | None = []
        self._closed = False
        self._printed = b""
        self._reader: FrameReader | None = None
        self._noise = b""
        self._sending, self._state = threading.Lock(), threading.Lock()
        self._heard, self._shown = time.monotonic(), 0.0
        self._error: PsError | None = None
        self._popen = subprocess.Popen(
            shim.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
        self._thread = threading.Thread(target=self._run, name=f"host {begin.host}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def start(self, launch: Launch, log: BinaryIO | None) -> RemoteProcess:
        """Start a process there, as soon as the host is ready."""
        name = launch.process
        process = RemoteProcess(name, log, lambda signum: self._send_message(SendSignal(name, signum)), self.close)
        with self._state:
            lost = self._closed
            if not lost:
                self._processes[name] = process
        if lost:
            process.ended(SSH_FAILED, why=self._lost_words())
        else:
            self._send_message(launch)
        return process

    def leave(self) -> None:
        """Close the connection: the host's program ends what it has started, and then itself."""
        with self._sending, suppress(OSError):
            if self._popen.stdin is not None:
                self._popen.stdin.close()

    def close(self) -> None:
        """End the connection, at once unless ``leave`` was called; returns when ssh has ended."""
        if self._popen.stdin is not None and self._popen.stdin.closed and self._held is None:
            self._thread.join(times.GRACE_SECONDS)
        if self._thread.is_alive():
            with suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._thread.join(times.GRACE_SECONDS)

    def _send_message(self, message: Message) -> None:
        data = pack(message)
        with self._sending:
            if self._held is not None:
                self._held.append(data)
            else:
                self._write(data)

    def _write(self, data: bytes) -> None:
        """Called under ``_sending``. What cannot be sent is lost with the connection."""
        assert self._popen.stdin is not None
        view = memoryview(data)
        with suppress(OSError, ValueError):
            while view:
                view = view[os.write(self._popen.stdin.fileno(), view) :]

    def _run(self) -> None:
        error: PsError | None = None
        try:
            self._read()
        except PsError as raised:
            error = raised
            with suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        code = self._exit_code()
        self._read_last_words()
        printed = self._printed.decode("utf-8", "replace")
        error = error or failure(self._begin.host, self._python, None if code == -signal.SIGKILL else code, printed)
        with self._state:
            self._closed, self._error = True, error
            processes, self._processes = list(self._processes.values()), {}
        if not self.ready.done():
            self.ready.set_exception(error)
        for process in processes:
            process.ended(SSH_FAILED, why=self._lost_words())
        with self._sending:
            for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()

    def _exit_code(self) -> int:
        """Of ssh, which has closed its output."""
        try:
            return self._popen.wait(times.GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            return self._popen.wait()

    def _read_last_words(self) -> None:
        assert self._popen.stderr is not None
        with suppress(BlockingIOError):
            while data := os.read(self._popen.stderr.fileno(), _READ_BYTES):
                self._printed = (self._printed + data)[-_MOST_PRINTED_BYTES:]

    def _lost_words(self) -> str:
        return f"was lost with the connection to {self._begin.host} ({self._error})"

    def _read(self) -> None:
        """Until the connection ends. Raises PsError where it must not go on."""
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        pause = self._begin.silence_seconds / 4
        with selectors.DefaultSelector() as selector:
            for stream in (self._popen.stdout, self._popen.stderr):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while self._popen.stdout in selector.get_map():
                for key, _ in selector.select(pause):
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is self._popen.stderr:
                        self._printed = (self._printed + data)[-_MOST_PRINTED_BYTES:]
                    else:
                        self._heard = time.monotonic()
                        self._feed(data)
                if time.monotonic() - self._heard > self._begin.silence_seconds:
                    raise self._silent()
                self._show_life(pause)

    def _silent(self) -> PsError:
        if not self.ready.done():
            return failure(self._begin.host, self._python, None, self._printed.decode("utf-8", "replace"))
        return Unavailable(
            f"{self._begin.host}: no message for {self._begin.silence_seconds:g} s",
            remedy="see whether the host and the network to it are well",
        )

    def _show_life(self, pause: float) -> None:
        """Not while the runner's thread writes: that is as good."""
        now = time.monotonic()
        if self._held is None and now - self._shown > pause and self._sending.acquire(blocking=False):
            self._shown = now
            self._write(pack(Alive()))
            self._sending.release()

    def _feed(self, data: bytes) -> None:
        if self._reader is None:
            self._noise += data
            before, found, rest = self._noise.partition(BEGINNING)
            if not found:
                self._noise = self._noise[-_MOST_PRINTED_BYTES:]
                return
            # What the login shell printed: part of the error if the connection fails.
            self._printed = (before + self._printed)[-_MOST_PRINTED_BYTES:]
            self._reader, data = FrameReader(), rest
        for fields, payload in self._reader.feed(data):
            self._handle(unpack(fields, payload))

    def _handle(self, message: Message) -> None:
        match message:
            case Hello(theirs):
                if theirs != (ours := version("torch-ps")):
                    raise other_version(self._begin.host, theirs, ours)
                with self._sending:
                    self._write(pack(self._begin))
            case Ready():
                with self._sending:
                    for data in self._held or []:
                        self._write(data)
                    self._held = None
                self.ready.set_result(message)
            case Declined(words, expected, actual, remedy):
                text = f"{self._begin.host}: {words}"
                raise ConfigError(text, expected=expected, actual=actual, remedy=remedy)
            case Started(name, pid):
                if (process := self._processes.get(name)) is not None:
                    process.begun(pid)
            case Hangs(name, why):
                if (process := self._processes.get(name)) is not None:
                    process.hanging(why)
            case Printed(name, data):
                if (process := self._processes.get(name)) is not None:
                    process.wrote(data)
            case Serving(address):
                self.coordinator = address
            case Ended(name, code, peak_bytes):
                with self._state:
                    process = self._processes.pop(name, None)
                if process is not None:
                    process.ended(code, peak_bytes)
            case _:
                pass
