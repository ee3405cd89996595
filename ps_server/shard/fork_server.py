"""Imports what a shard is made of, then forks a shard whenever ps-run asks: ``python -m … SOCKET PADDING``.

It starts no thread and makes no gRPC object, for a fork takes neither along; it ends when it finds a thread. A forked
shard becomes a child of ps-run, which is the subreaper while it asks (prctl(2)): its signals, its end and its peak
memory are ps-run's to see, and it lives on when this process ends.

A request is one byte with two or more descriptors: a stream to ps-run, the output, and what else stays open. Over the
stream the shard sends its number, then receives its command line and environment. Before those have arrived whole it
is nothing: it ends when ps-run gives it up.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from ps_protocol.launch.shim import dies_with
from ps_server.shard import main as shard

READY = b"ready"
MAX_DESCRIPTORS = 8
_MAX_SAID_BYTES = 1 << 16


_PR_SET_NAME = 15

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Places in /proc/PID/stat after the name of the process: fields 48 and 49 of proc(5)."""


def show_title(name: str, command: Sequence[str]) -> None:
    """List this process as ``name``, up to 15 bytes, with the command line ``command``.

    The memory of the arguments is written, as daemons do: Python has copied them. What has no room is left out.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(name)[:15])
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    if not begin or begin >= end:  # the kernel does not tell
        return
    shown = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))


class _Request(NamedTuple):
    """What a forked shard has of it: the stream to ps-run, and its output."""

    stream: socket.socket
    output: int


def main() -> None:
    """Serve ps-run until it hangs up, or is a forked shard from then on."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    launcher, inherited = os.getppid(), set(os.environ)
    show_title("ps-servers", sys.orig_argv[:-1])
    shard.serving()
    _check_threads()
    requests.send(READY)
    while True:
        data, files, _, _ = socket.recv_fds(requests, 1, MAX_DESCRIPTORS)
        if not data:
            return
        forked: _Request | None = None
        with suppress(OSError):  # no process may be added: ps-run sees that the stream is closed
            forked = _fork(files)
        if forked:
            requests.close()
            _become(forked, launcher, inherited)
        for descriptor in files:
            os.close(descriptor)


def _check_threads() -> None:
    """Exit where threads run that a fork would leave behind. Those of OpenBLAS end before a fork, by themselves."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        sys.exit(f"imports have started {threads - 1} thread(s), which no fork takes along")


def _fork(files: list[int]) -> _Request | None:
    """Returns twice: in the shard with its request, when it is a child of ps-run. Raises OSError in this process."""
    adopted, here = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(adopted)
        os.close(here)
        raise
    if between:
        os.close(adopted)
        os.waitpid(between, 0)
        os.close(here)
        return None
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os._exit(0)
    os.close(here)
    # At its end, the process between has been waited for: this one has got its new parent.
    os.read(adopted, 1)
    os.close(adopted)
    return _Request(socket.socket(fileno=files[0]), files[1])


def _become(request: _Request, launcher: int, inherited: set[str]) -> NoReturn:
    """Be the shard that ps-run asks for, to its end. ``inherited``: variables that were there before the imports."""
    if not dies_with(launcher):
        os._exit(1)
    os.setpgid(0, 0)
    # What imports have written is the shard's, as it would be of a program.
    said = os.pread(2, _MAX_SAID_BYTES, 0)
    for number in (1, 2):
        os.dup2(request.output, number)
    os.close(request.output)
    try:
        with request.stream as stream:
            stream.sendall(os.getpid().to_bytes(8, "big"))
            told = b"".join(iter(lambda: stream.recv(1 << 16), b""))
        program, arguments, environment = json.loads(told)
    except (OSError, ValueError):  # ps-run has given it up
        os._exit(1)
    for variable in inherited - environment.keys():
        os.environ.pop(variable, None)
    os.environ.update(environment)
    os.write(2, said)
    number = arguments[arguments.index("--shard") + 1]
    show_title(f"ps-server {number}", [*program, *arguments])
    # As an interpreter that is told -m: usage errors name the module.
    sys.modules["__main__"] = shard
    sys.argv = [str(shard.__file__), *arguments]
    shard.program()


if __name__ == "__main__":
    main()
