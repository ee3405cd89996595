"""Puts the runtime in the place of the modules that the shipped code imports, for the time of a run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import secrets
import select
import selectors
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import grpc

from ps_protocol.times import END_SECONDS
from ps_server.log import record, segments
from ps_server.serving import grpc_server
from ps_server.shard import resharding
from ps_server.shard import times as shard_times
from ps_server.shard.durability import snapshotter
from ps_worker import times, trained_models
from ps_worker.host import group
from simulation.runtime import futures, locks, threads, wait
from simulation.runtime.aio_clients import AioChannel
from simulation.runtime.clients import Channel
from simulation.runtime.disk import Files
from simulation.runtime.ear import heard
from simulation.runtime.kernel import Kernel
from simulation.runtime.network import Network
from simulation.runtime.servers import Server
from simulation.runtime.unix_sockets import Poll, Selector, UnixSockets

_PACKAGES = ("ps_protocol", "ps_server", "ps_worker")

_LATER = ("ps_protocol.wire.row_means", "ps_server.tables.table", "ps_worker.tables.row_kernels")
"""Modules that the shipped code imports at their first use."""

EPOCH_SECONDS = 1_700_000_000.0
"""The day's clock at the beginning of a run."""

PORT = 7000

_PERIODS: Sequence[tuple[ModuleType, str, float]] = (
    (snapshotter, "_SMALL_BYTES", 0),
    (shard_times, "SNAPSHOT_LOOK_SECONDS", 0.7),
    (times, "NO_OP_PAUSE_SECONDS", 0.2),
    (group, "_PAUSE_SECONDS", 0.1),
)
"""What is asked for many times a second: a step takes about a second here, and nothing happens meanwhile."""


_SMALL_LOGS: Sequence[tuple[ModuleType, str, float]] = (
    (record, "MESSAGE_BYTES", 3 << 10),
    (resharding, "_MESSAGE_BYTES", 3 << 10),
    (segments, "_SMALLEST_SEGMENT_BYTES", 4 << 10),
)
"""What a log sets aside for a message, and its smallest file: a log of some kilobytes holds some twenty records."""


class _Time:
    """``time``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def monotonic() -> float:
        return wait.kernel().now

    perf_counter = thread_time = monotonic

    @staticmethod
    def time() -> float:
        return EPOCH_SECONDS + wait.kernel().now

    @staticmethod
    def time_ns() -> int:
        return int((EPOCH_SECONDS + wait.kernel().now) * 1e9)

    @staticmethod
    def sleep(seconds: float) -> None:
        wait.sleep(seconds)


class _Threading:
    """``threading``."""

    Thread, Lock, RLock = threads.Thread, locks.Lock, locks.RLock
    Condition, Event = locks.Condition, locks.Event
    current_thread, get_ident = staticmethod(threads.current_thread), staticmethod(threads.get_ident)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Queue:
    """``queue``."""

    SimpleQueue, Queue = locks.SimpleQueue, locks.SimpleQueue

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)


class _Secrets:
    """``secrets``, from the seed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)

    @staticmethod
    def token_bytes(size: int) -> bytes:
        return wait.kernel().random.randbytes(size)

    @staticmethod
    def token_hex(size: int) -> str:
        return wait.kernel().random.randbytes(size).hex()

    @staticmethod
    def randbits(bits: int) -> int:
        return wait.kernel().random.getrandbits(bits)


class _Uuid:
    """``uuid``, from the seed."""

    @staticmethod
    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=wait.kernel().random.getrandbits(128))


class _Socket:
    """``socket``: nothing listens where it looks, but processes of its own host."""

    def __init__(self, sockets: UnixSockets) -> None:
        self.socket, self.socketpair = sockets.socket, sockets.socketpair

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    @staticmethod
    def gethostname() -> str:
        return wait.process().name

    @staticmethod
    def create_connection(address: object, timeout: float | None = None) -> None:
        raise ConnectionRefusedError("nothing listens there")


class _Select:
    """``select``."""

    poll = Poll

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)


class _Selectors:
    """``selectors``."""

    DefaultSelector = Selector

    def __getattr__(self, name: str) -> Any:
        return getattr(selectors, name)


class _Tempfile:
    """``tempfile``: each host has temporary files of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)

    @staticmethod
    def gettempdir() -> str:
        return wait.process().environment.get("TMPDIR") or tempfile.gettempdir()


class _GrpcAio:
    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc.aio, name)

    def insecure_channel(self, address: str, options: object = None) -> AioChannel:
        return AioChannel(self._network, address)


class _Grpc:
    """``grpc``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.aio = _GrpcAio(network)

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc, name)

    def insecure_channel(self, address: str, options: object = None) -> Channel:
        return Channel(self._network, address)


@dataclass
class Running:
    """What ``grpc_server.start`` returns. Callers are not limited, and not asked who they are."""

    address: str
    port: int
    _server: Server

    async def stop(self, grace_seconds: float = END_SECONDS) -> None:
        """Take no more calls."""
        await self._server.stop(grace_seconds)


def _start(network: Network) -> Callable[..., Any]:
    async def start(bind: str, port: int, services: Sequence[tuple[str, Any]], *_: Any, **__: Any) -> Running:
        server = Server(network, wait.process(), f"{bind}:{port}")
        for _name, register in services:
            register(server)
        return Running(server.address, port, server)

    return start


@dataclass(frozen=True, slots=True)
class _Place:
    """A name of the shipped code that means something of the table."""

    holder: Any
    name: str
    value: Any


@cache
def _originals() -> dict[int, str]:
    """What is replaced: by identity, its name here."""
    import os

    from_modules: list[tuple[object, str]] = [
        (time, "time"),
        (time.monotonic, "monotonic"),
        (threading, "threading"),
        (queue, "queue"),
        (secrets, "secrets"),
        (uuid, "uuid"),
        (socket, "socket"),
        (select, "select"),
        (selectors, "selectors"),
        (tempfile, "tempfile"),
        (os, "os"),
        (grpc, "grpc"),
        (concurrent.futures.Future, "Future"),
        (concurrent.futures.ThreadPoolExecutor, "ThreadPoolExecutor"),
        (concurrent.futures.wait, "wait"),
        (asyncio.run_coroutine_threadsafe, "run_coroutine_threadsafe"),
        (grpc_server.start, "start"),
    ]
    return {id(original): name for original, name in from_modules}


@cache
def _places(names: tuple[str, ...]) -> tuple[list[_Place], list[tuple[FunctionType, int]]]:
    """Where these modules of the shipped code name them: module globals, and defaults of parameters."""
    originals = _originals()
    places: list[_Place] = []
    defaults: list[tuple[FunctionType, int]] = []
    for module in map(sys.modules.__getitem__, names):
        for attribute, value in list(vars(module).items()):
            if id(value) in originals:
                places.append(_Place(module, attribute, value))
            if isinstance(value, type) and value.__module__ == module.__name__:
                functions = [each for each in vars(value).values() if isinstance(each, FunctionType)]
                for function in functions:
                    for at, default in enumerate(function.__defaults__ or ()):
                        if id(default) in originals:
                            defaults.append((function, at))
    return places, defaults


def _shipped() -> tuple[str, ...]:
    """The names of the modules of the shipped code that are there."""
    return tuple(sorted(name for name in sys.modules if name.partition(".")[0] in _PACKAGES))


def _check_replaced(names: tuple[str, ...]) -> None:
    """Raises AssertionError where a run has imported a module that went past the runtime: it could not be repeated."""
    late, _ = _places(tuple(name for name in _shipped() if name not in names))
    if late:
        found = sorted({place.holder.__name__ for place in late})
        raise AssertionError(f"imported in the middle of a simulated run: {', '.join(found)}; name it in _LATER")


@contextmanager
def installed(kernel: Kernel, network: Network, files: Files, *, small_log: bool = False) -> Iterator[None]:
    """Within the block the shipped code runs on ``kernel``, ``network`` and ``files``.

    ``small_log``: a log may be smaller than it could be otherwise.
    """
    values_here: list[tuple[ModuleType, str, Any]] = [
        *_PERIODS,
        *(_SMALL_LOGS if small_log else ()),
        (trained_models, "_trained", set()),  # a warning would depend on the runs before
    ]
    table = {
        "time": _Time(),
        "monotonic": _Time.monotonic,
        "threading": _Threading(),
        "queue": _Queue(),
        "secrets": _Secrets(),
        "uuid": _Uuid(),
        "socket": _Socket(UnixSockets(files)),
        "select": _Select(),
        "selectors": _Selectors(),
        "tempfile": _Tempfile(),
        "os": files,
        "grpc": _Grpc(network),
        "Future": futures.Future,
        "ThreadPoolExecutor": futures.ThreadPoolExecutor,
        "wait": futures.wait,
        "run_coroutine_threadsafe": futures.run_coroutine_threadsafe,
        "start": _start(network),
    }
    originals = _originals()
    for name in _LATER:
        import_module(name)
    names = _shipped()
    places, defaults = _places(names)
    values_outside = [(module, name, getattr(module, name)) for module, name, _ in values_here]
    before = [(function, function.__defaults__) for function, _ in defaults]
    wait.use(kernel)
    try:
        for module, name, value in values_here:
            setattr(module, name, value)
        for place in places:
            setattr(place.holder, place.name, table[originals[id(place.value)]])
        for function, at in defaults:
            values = list(function.__defaults__ or ())
            values[at] = table[originals[id(values[at])]]
            function.__defaults__ = tuple(values)
        with heard(kernel, _PACKAGES):
            yield
        _check_replaced(names)
    finally:
        for place in places:
            setattr(place.holder, place.name, place.value)
        for function, values_before in before:
            function.__defaults__ = values_before
        for module, name, value in values_outside:
            setattr(module, name, value)
        wait.use(None)
