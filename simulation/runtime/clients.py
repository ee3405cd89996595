"""Stands for the channels of ``grpc``: called from threads, which wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from simulation.runtime.calls import END, CallError, Metadata
from simulation.runtime.channel import BaseChannel, Codec, same
from simulation.runtime.locks import SimpleQueue
from simulation.runtime.threads import Thread


class Channel(BaseChannel):
    """As ``grpc.Channel``: called from threads, which wait."""

    def unary_unary(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        def call(
            request: Any,
            timeout: float | None = None,
            metadata: Metadata | None = None,
            wait_for_ready: bool | None = None,
        ) -> Any:
            made = _ThreadCall(self, method, metadata, timeout, wait_for_ready, response_deserializer)
            made.send((request_serializer or same)(request))
            made.send(END)
            return made.result()

        return call

    def stream_unary(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""
        return _StreamUnary(self, method, request_serializer, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        def call(
            request: Any,
            timeout: float | None = None,
            metadata: Metadata | None = None,
            wait_for_ready: bool | None = None,
        ) -> _ThreadCall:
            made = _ThreadCall(self, method, metadata, timeout, wait_for_ready, response_deserializer)
            made.send((request_serializer or same)(request))
            made.send(END)
            return made

        return call

    def stream_stream(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        def call(
            requests: Iterator[Any],
            timeout: float | None = None,
            metadata: Metadata | None = None,
            wait_for_ready: bool | None = None,
        ) -> _ThreadCall:
            made = _ThreadCall(self, method, metadata, timeout, wait_for_ready, response_deserializer)
            made.send_all(requests, request_serializer)
            return made

        return call

    def close(self) -> None:
        """End all calls."""
        self.end_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StreamUnary:
    def __init__(self, channel: Channel, method: str, write: Codec, parse: Codec) -> None:
        self._channel, self._method, self._write, self._parse = channel, method, write, parse

    def future(
        self,
        requests: Iterator[Any],
        timeout: float | None = None,
        metadata: Metadata | None = None,
        wait_for_ready: bool | None = None,
    ) -> _ThreadCall:
        """Begin it."""
        made = _ThreadCall(self._channel, self._method, metadata, timeout, wait_for_ready, self._parse)
        made.send_all(requests, self._write)
        return made


class _ThreadCall:
    """One call as threads see it: its replies, its end."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        metadata: Metadata | None,
        timeout: float | None,
        wait_for_ready: bool | None,
        parse: Codec,
    ) -> None:
        self._parse = parse or same
        self._arrived = SimpleQueue()
        self._error: CallError | None = None
        self._ended = False
        self._callbacks: list[Callable[[], object]] = []
        self._call = channel.begin(method, metadata, timeout, wait_for_ready, self._arrived.put, self._end)

    def send(self, message: Any) -> None:
        """One message, or END."""
        self._call.send(message)

    def send_all(self, requests: Iterator[Any], write: Codec) -> None:
        """Have a thread send what ``requests`` yields."""

        def run() -> None:
            for request in requests:
                if self._ended:
                    return
                self.send((write or same)(request))
            self.send(END)

        Thread(target=run, name="requests").start()

    def _end(self, error: CallError | None) -> None:
        self._ended, self._error = True, error
        self._arrived.put(END)
        for callback in self._callbacks:
            callback()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        message = self._arrived.get()
        if message is not END:
            return self._parse(message)
        self._arrived.put(END)
        if self._error is not None:
            raise self._error
        raise StopIteration

    def result(self, timeout: float | None = None) -> Any:
        """The one reply. Raises how the call failed."""
        for message in self:
            return message
        raise CallError(grpc.StatusCode.INTERNAL, "no reply")

    def is_active(self) -> bool:
        """Whether it has not ended."""
        return not self._ended

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Call it at the end; False when that has been."""
        if self._ended:
            return False
        self._callbacks.append(callback)
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call it at the end, or now."""
        if not self.add_callback(lambda: callback(self)):
            callback(self)

    def cancel(self) -> bool:
        """Give it up."""
        self._call.cancel()
        return True

    def code(self) -> grpc.StatusCode:
        """Its status."""
        return self._error.code() if self._error else grpc.StatusCode.OK

    def details(self) -> str:
        """Its text."""
        return self._error.details() if self._error else ""

    def trailing_metadata(self) -> Metadata:
        """What came with its status."""
        return self._error.trailing_metadata() if self._error else ()
