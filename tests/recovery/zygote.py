"""Starts programs as processes forked from one that has imported everything: in 50 ms instead of seconds.

They are processes like any other: killed, frozen and waited for one by one. Test processes that run beside each other
have one ``Nursery``, which imports once and forks a zygote for each. Large libraries are imported by a process forked
from the nursery, once too: the zygotes of most tests stay small, since what is large takes longer to fork.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from tests.recovery import inside

COORDINATOR, SHARD, WORKER, PS_RUN, PYTHON = "coordinator", "shard", "worker", "ps-run", "python"

Programs = dict[str, Callable[[Sequence[str]], None]]
"""By kind, what is run."""

#: How long a test waits for a process to end before it fails.
PATIENCE_SECONDS = 60.0


NURSERY = "TESTS_NURSERY"
"""The address of the nursery, for the processes of a test session."""


@functools.cache
def shared() -> Zygote:
    """The one of this test process."""
    if NURSERY not in os.environ:
        os.environ[NURSERY] = nursery().address
    started = Zygote(os.environ[NURSERY])
    atexit.register(started.close)
    return started


@functools.cache
def nursery() -> Nursery:
    """The one of this test session, which ends with the process that calls first."""
    started = Nursery()
    atexit.register(started.close)
    return started


class Nursery:
    """A process that forks zygotes, once somebody asks for the first."""

    def __init__(self) -> None:
        self.address = f"torch-ps-tests-{os.getpid()}"
        self._lives, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # An abstract address: nothing is left in the file system.
            listener.bind(f"\0{self.address}")
            listener.listen()
            passed = [listener.fileno(), theirs.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.recovery.zygote", *map(str, passed)],
                pass_fds=passed,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        self._lives.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Zygote:
    """Used by the thread of the test."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connect()

    def start(
        self, kind: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> Forked:
        """Run a program of ``kind``; ``files`` are its standard input, output and error."""
        pid = self._ask({"kind": kind, "arguments": list(arguments), "environment": dict(environment)}, files)
        return Forked(self, pid)

    def load(self, *modules: str) -> None:
        """Have processes that are started from now on begin with ``modules`` imported, until ``unload``."""
        missing = [module for module in modules if module not in self._modules]
        if missing and self._ask({"idle": True}):
            self._reconnect(*self._modules, *missing)
        for module in set(missing) - set(self._modules):
            self._ask({"load": module})

    def unload(self) -> None:
        """Have processes that are started from now on begin without libraries, if none runs."""
        if self._modules and self._ask({"idle": True}):
            self._reconnect()

    def poll(self, pid: int) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code: int | None = self._ask({"poll": pid})
        return code

    def close(self) -> None:
        """It ends, and with it whatever it has started."""
        self._socket.close()

    def _connect(self, *modules: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(f"\0{self._address}")
        self._socket.send(json.dumps(modules).encode())
        self._modules = modules
        self.pid: int = json.loads(self._socket.recv(1 << 16))

    def _reconnect(self, *modules: str) -> None:
        self._socket.close()
        self._connect(*modules)

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        return json.loads(self._socket.recv(1 << 16))


class Forked:
    """One process."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        #: The exit code, once it was asked for and there.
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._zygote.poll(self.pid)
        return self.code

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        if self.code is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                if not ended.poll(seconds * 1000):
                    raise AssertionError(f"process {self.pid} did not end within {seconds:g} s")
            finally:
                os.close(descriptor)
        code = self.poll()
        assert code is not None
        return code

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def stopped(self) -> bool:
        """Whether it is frozen by SIGSTOP."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def main() -> None:
    """The nursery: waits for the first test process, imports, then forks a zygote for each one that connects."""
    listener, lives = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    programs: Programs = {}
    children = []
    libraries: socket.socket | None = None
    while True:
        ready, _, _ = select.select([listener, lives], [], [])
        if lives in ready:
            if libraries:
                libraries.close()
            # Each ends with its test process.
            for pid in children:
                os.waitpid(pid, 0)
            return
        connected, _ = listener.accept()
        programs = programs or _imported()
        modules = json.loads(connected.recv(1 << 16))
        if not modules:
            children.append(_zygote(connected, programs, listener, lives, libraries))
            continue
        if libraries is None:
            libraries, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            children.append(os.fork())
            if not children[-1]:
                for each in (listener, lives, libraries, connected):
                    each.close()
                finish(functools.partial(_libraries, theirs, programs))
            theirs.close()
        socket.send_fds(libraries, [json.dumps(modules).encode()], [connected.fileno()])
        connected.close()


def _zygote(connected: socket.socket, programs: Programs, *others: socket.socket | None) -> int:
    """Fork one that serves ``connected``, without ``others``."""
    if pid := os.fork():
        connected.close()
        return pid
    for each in others:
        if each:
            each.close()
    _serve(connected, programs)
    os._exit(0)


def _libraries(requests: socket.socket, programs: Programs) -> None:
    """A nursery of zygotes that have imported libraries, until the first nursery ends."""
    children = []
    while True:
        data, files, _, _ = socket.recv_fds(requests, 1 << 16, 1)
        if not data:
            for pid in children:
                os.waitpid(pid, 0)
            return
        for module in json.loads(data):
            importlib.import_module(module)
        gc.collect()
        gc.freeze()
        children.append(_zygote(socket.socket(fileno=files[0]), programs, requests))


def _imported() -> Programs:
    import ps_worker  # noqa: F401, I001 -- first, for it tells gRPC about forks
    import ps_server.coordinator.main
    import ps_server.shard.main
    from ps_server import tables
    from ps_server.log import segments
    from ps_server.shard import times
    from tests.cli import forked
    from tests.recovery import reference, scripts
    from tests.support.tables import table_spec

    # Several segments, also of a model of some bytes.
    segments.SEGMENT_BYTES = 1 << 18
    # Rows go all the time; more often, and idle shards would cost more than those that train.
    times.EXPIRY_SECONDS = 0.05
    # torch imports a great deal at an optimizer's first step.
    for name in ("Adam", "SGD"):
        reference.alone(1, name)
    # So does what handles rows, which loads machine code too.
    tables.warm_up(table_spec())
    # What nobody collects, nobody copies.
    gc.collect()
    gc.freeze()
    return {
        COORDINATOR: ps_server.coordinator.main.main,
        SHARD: ps_server.shard.main.main,
        WORKER: scripts.main,
        PS_RUN: forked.ps_run,
        PYTHON: python,
    }


def _serve(requests: socket.socket, programs: Programs) -> None:
    """The zygote: answers one test process until that hangs up, then ends what it has started."""
    running = set[int]()
    requests.send(json.dumps(os.getpid()).encode())
    while True:
        data, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not data:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return
        request = json.loads(data)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running.discard(pid)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        if "idle" in request:
            requests.send(json.dumps(not running).encode())
            continue
        if "load" in request:
            importlib.import_module(request["load"])
            requests.send(b"null")
            continue
        pid = os.fork()
        if not pid:
            requests.close()
            _run(programs[request["kind"]], request, files)
        running.add(pid)
        for descriptor in files:
            os.close(descriptor)
        requests.send(json.dumps(pid).encode())


def python(arguments: Sequence[str]) -> None:
    """What an interpreter does that is told ``-m MODULE …``, ``-c CODE …`` or ``SCRIPT …``."""
    first, *rest = arguments
    sys.argv = list(arguments)
    if first == "-m":
        sys.argv = rest
        importlib.import_module(rest[0]).main()
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def _run(program: Callable[[Sequence[str]], None], request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """In the child: become ``program``."""

    def work() -> None:
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
        os.closerange(3, 64)
        os.environ.update(request["environment"])
        with ExitStack() as held:
            inside.obey(os.environ, held)
            program(request["arguments"])

    finish(work)


def finish(work: Callable[[], None]) -> NoReturn:
    """In a child: ``work``, then end as an interpreter would."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 -- the process ends with it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
