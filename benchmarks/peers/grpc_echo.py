"""The floor of the gRPC transport: as many bytes there and back on one stream of Python's gRPC; nothing is applied.

Channel, server, chunks and allocator are set as torch-ps sets them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from benchmarks.crew import Crowd
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop
from ps_protocol.rpc.channel import listen, new_server, open_channel
from ps_protocol.wire.frames import CHUNK_BYTES
from ps_server.shard.main import tune_allocator
from ps_worker.transport.grpc_stream import keep_freed_memory

SYSTEM = "Python gRPC"
ECHO = "push+pull"

_SERVICE, _CALL = "benchmarks.Echo", "Echo"


def subject(nbytes: int, workers: int, seconds: float) -> Subject:
    """``workers`` clients of one server; ``seconds``: how long a visit is."""

    @contextmanager
    def opened() -> Iterator[Crowd]:
        with ExitStack() as stack:
            far = stack.enter_context(Child(server, nbytes))
            address = far.ready()
            near = [stack.enter_context(Child(worker, address, nbytes)) for _ in range(workers)]
            for child in near:
                child.ready()
            yield Crowd(near, [far.pid], seconds)  # idle gRPC takes no time, and keep-alive would miss what is stopped

    return Subject((Key(SYSTEM, ECHO, nbytes, workers=workers),), opened)


@dataclass(frozen=True)
class _Served:
    address: str
    server: grpc.aio.Server


@contextmanager
def server(nbytes: int) -> Iterator[_Served]:
    """The role of the far side: keeps ``nbytes`` that have come, and sends them back."""
    tune_allocator()
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    served = asyncio.run_coroutine_threadsafe(_serve(nbytes), loop).result()
    yield served
    asyncio.run_coroutine_threadsafe(served.server.stop(None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _serve(nbytes: int) -> _Served:
    async def echo(_: object, context: Any) -> None:
        held = memoryview(bytearray(nbytes))
        while True:
            at = 0
            while at < nbytes:
                data = await context.read()
                if data is grpc.aio.EOF:
                    return
                held[at : at + len(data)] = data
                at += len(data)
            for begin in range(0, nbytes, CHUNK_BYTES):
                await context.write(bytes(held[begin : begin + CHUNK_BYTES]))

    handlers = {_CALL: grpc.stream_stream_rpc_method_handler(echo)}
    serving = new_server()
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = listen(serving, "127.0.0.1:0")
    await serving.start()
    return _Served(f"127.0.0.1:{port}", serving)


@contextmanager
def worker(address: str, nbytes: int) -> Iterator[Loop]:
    """The role of the near side, which is timed."""
    keep_freed_memory()
    gradients, parameters = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def chunks() -> Iterator[bytes]:
        while wanted.get():
            for begin in range(0, nbytes, CHUNK_BYTES):
                yield bytes(gradients[begin : begin + CHUNK_BYTES])

    with open_channel(address) as channel:
        call: Any = channel.stream_stream(f"/{_SERVICE}/{_CALL}")(chunks())

        def exchange() -> None:
            wanted.put(True)
            at = 0
            while at < nbytes:
                data = next(call)
                parameters[at : at + len(data)] = data
                at += len(data)

        yield Loop({ECHO: exchange})
        wanted.put(False)
