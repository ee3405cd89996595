"""What the channels for threads and the channels for coroutines have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation.runtime.calls import Call, CallError, Metadata
from simulation.runtime.network import Network
from simulation.runtime.wait import process

Codec = Callable[[Any], Any] | None


class BaseChannel:
    """What both kinds of channels have."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._open: dict[Call, None] = {}
        self._closed = False

    def begin(
        self,
        method: str,
        metadata: Metadata | None,
        timeout: float | None,
        wait_for_ready: bool | None,
        on_message: Callable[[bytes], None],
        on_end: Callable[[CallError | None], None],
    ) -> Call:
        """One call. Raises ValueError on a closed channel, as grpc does."""
        self._network.kernel.check_alive()
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        begun: list[Call] = []

        def ended(error: CallError | None) -> None:
            for each in begun:
                self._open.pop(each, None)
            on_end(error)

        call = Call(
            self._network,
            process(),
            self._address,
            method,
            tuple(metadata or ()),
            timeout,
            wait_for_ready=bool(wait_for_ready),
            on_message=on_message,
            on_end=ended,
        )
        begun.append(call)
        self._open[call] = None
        return call

    def end_all(self) -> None:
        """Close it."""
        self._closed = True
        for call in list(self._open):
            call.cancel()


def same(data: Any) -> Any:
    """For methods that carry raw bytes."""
    return data
