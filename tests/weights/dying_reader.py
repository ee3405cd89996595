"""Programs that end as with ``kill -9`` at one chosen event: a reader with a cache, and ``psctl weights follow``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ps_worker
from ps_protocol.weights import pieces, version
from ps_protocol.wire import carrier
from ps_server.cli.psctl.main import main as psctl
from tests.checkpoint.faults import watched

NEVER = 1 << 30


class Fuse:
    """Counts events, and ends the process at one of them."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.seen = 0

    def __call__(self, *_: Any) -> None:
        self.seen += 1
        if self.seen > self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real`` with an event before it and one after it."""

        def call(*arguments: Any, **options: Any) -> Any:
            self()
            result = real(*arguments, **options)
            self()
            return result

        return call


class HalfWritten:
    """A file of which each write is two, with an event after each."""

    def __init__(self, file: Any, fuse: Fuse) -> None:
        self._file, self._fuse = file, fuse

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for part in (view[: len(view) // 2], view[len(view) // 2 :]):
            self._file.write(part)
            self._file.flush()
            self._fuse()


def reader() -> None:
    """Follow to the newest version with a cache, and say how many events there were."""
    address, folder, number, dtype = sys.argv[1:5]
    fuse = Fuse(int(number))
    # On a busy machine; without a side channel there would be other events.
    pieces.SIDE_CHANNEL_SECONDS = 60.0
    replacing = version.replacing  # type: ignore[attr-defined]

    @contextmanager
    def in_halves(*arguments: Any, **options: Any) -> Iterator[HalfWritten]:
        with replacing(*arguments, **options) as file:
            yield HalfWritten(file, fuse)

    # Receives, stages, applies, saves, swaps.
    pieces._Stage.place = fuse.around(pieces._Stage.place)  # type: ignore[method-assign]
    pieces._Steps.apply = fuse.around(pieces._Steps.apply)  # type: ignore[method-assign]
    pieces.ChunkReceiver.take = fuse.around(pieces.ChunkReceiver.take)  # type: ignore[attr-defined,method-assign]
    receive_into = carrier.PlainCarrier.receive_into

    def received(self: carrier.PlainCarrier, places: Sequence[memoryview]) -> None:
        for place in places:
            for part in (place[: len(place) // 2], place[len(place) // 2 :]):
                receive_into(self, [part])
                fuse()

    carrier.PlainCarrier.receive_into = received  # type: ignore[method-assign,assignment]
    version.replacing = in_halves  # type: ignore[attr-defined,assignment]
    with (
        watched(fuse),
        ps_worker.subscribe(
            "policy", coordinator=address, cache=folder, follow=False, dtype=getattr(torch, dtype) if dtype else None
        ) as versions,
    ):
        for each in versions:
            fuse()
            each.tensors()
    print(fuse.seen, flush=True)


def endless() -> None:
    """Follow with a cache until the process is killed; say each number."""
    address, folder = sys.argv[1:3]
    with ps_worker.subscribe("policy", coordinator=address, cache=folder) as versions:
        for each in versions:
            print(each.number, flush=True)


def follower() -> None:
    """``psctl weights follow --once``; the number of file operations is said at the end."""
    address, folder, number = sys.argv[1:4]
    fuse, write = Fuse(int(number)), os.pwrite
    inside = Path(folder)

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if fuse.seen == fuse.left and name == "pwrite":
            descriptor, data, position = arguments
            write(descriptor, data[: len(data) // 2], position)
        fuse()

    told = ["weights", "follow", "policy", "--dir", str(inside), "--coordinator", address, "--once", "-o", "json"]
    with watched(before):
        psctl(told, standalone_mode=False)
    print(f"events {fuse.seen}", flush=True)
