"""A job in a network of its own, and every byte that goes over its loopback device: run by ``test_capture`` as root.

``tests.end_to_end.captured_job FOLDER TRANSPORT``, forked from the process that has imported everything, and its own
processes from it. FOLDER/servers.json and FOLDER/worker.json are the environments of both; FOLDER/capture is what was
seen, FOLDER/lost how many packets were not.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

import ps_server.coordinator.main
import ps_server.shard.main
import ps_worker
from tests.support.forks import Program

PARAMETER = torch.tensor([0.12345678, -7654.3213, 3.1415927e5, 2.7182818e-3])
GRADIENT = torch.tensor([-0.87654321, 1234.5679, -1.4142135e5, 1.7320508e-3])
REPEATED = 1 << 16
STEPS = 3

NO_NETWORK = 77
"""Exit code where the kernel lets nobody make one."""

_CLONE_NEWNET = 0x40000000
_UP, _GET_FLAGS, _SET_FLAGS = 0x1, 0x8913, 0x8914
_EVERYTHING, _RECEIVE_BUFFER, _STATISTICS, _PACKET_LEVEL = 0x0003, 33, 6, 263
_BUFFER_BYTES = 512 << 20


def loopback_up() -> None:
    """A new network's device is down."""
    with socket.socket() as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _GET_FLAGS, request))[1]
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


class Capture:
    """What goes over the loopback device, from here on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING))
        self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, _BUFFER_BYTES)
        self._socket.bind(("lo", 0))
        self._stop, self._stopping = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._file.open("wb") as file:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.register(self._stop, select.POLLIN)
            while True:
                ready = dict(poll.poll())
                if self._socket.fileno() in ready:
                    file.write(self._socket.recv(1 << 18))
                elif ready:
                    return

    def end(self) -> int:
        """How many packets there was no room for."""
        os.close(self._stopping)
        self._thread.join()
        _, lost = struct.unpack("II", self._socket.getsockopt(_PACKET_LEVEL, _STATISTICS, 8))
        self._socket.close()
        return int(lost)


def written(file: Path, program: Program) -> str:
    """What the program has put there."""
    pause = threading.Event()
    while not file.exists():
        if program.poll() is not None:
            raise SystemExit(f"{file.name} ended with code {program.poll()}")
        pause.wait(0.02)
    return file.read_text().strip()


def main() -> None:
    """The whole job."""
    folder, transport = Path(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
        raise SystemExit(NO_NETWORK)
    loopback_up()
    servers, worker = (json.loads((folder / f"{who}.json").read_text()) for who in ("servers", "worker"))
    started: list[Program] = []

    def start(name: str, program: Callable[[list[str]], None], *arguments: str) -> str:
        ready = folder / name
        flags = ["--port", "0", "--ready-file", str(ready), *arguments]
        started.append(Program(lambda: program(flags), servers))
        return written(ready, started[-1])

    capture = Capture(folder / "capture")
    try:
        coordinator = start("coordinator", ps_server.coordinator.main.main, "--workers", "1")
        start("shard", ps_server.shard.main.main, "--shard", "0", "--coordinator", coordinator, "--threads", "1")
        code = Program(lambda: train(coordinator, transport), worker).wait()
        if code:
            raise SystemExit(f"the worker ended with code {code}")
    finally:
        for program in reversed(started):
            program.terminate()
            program.wait()
        (folder / "lost").write_text(str(capture.end()))


def train(coordinator: str, transport: str) -> None:
    """In the worker: steps that leave the parameters as they are."""
    logging.basicConfig(level=logging.INFO)
    parameter = torch.nn.Parameter(PARAMETER.repeat(REPEATED))
    with ps_worker.connect(coordinator, transport=transport, device="cpu") as cluster:
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=0.0)
        for _ in range(STEPS):
            parameter.grad = GRADIENT.repeat(REPEATED)
            optimizer.step()
        assert torch.equal(parameter.detach(), PARAMETER.repeat(REPEATED))
