"""Decides what of one model may be decided now: everything, or only pushes up to a capture point, or nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from typing import TypeVar

from ps_protocol.errors import PsError
from ps_server.consistency import PushInfo, WorkerKey
from ps_server.tasks import Conditions

T = TypeVar("T")


class Gate:
    """Used on the shard's event loop. Open nearly always; a push that must wait keeps its memory.

    An open gate costs nothing: ``engaged`` and ``closed`` are attributes, asked before anything is called.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        """``before`` is called before anything has to wait: what came earlier passes."""
        self._before = before
        #: Something has to wait, or is refused.
        self.engaged = False
        #: What stopped the model; None while it runs.
        self.closed: PsError | None = None
        #: Nothing changes the model: neither pushes nor steps that become complete.
        self.paused = False
        #: The last sequence of each worker that may pass; None: everything may.
        self._targets: Mapping[WorkerKey, int] | None = None
        self._conditions = Conditions()

    def admit(self, targets: Mapping[WorkerKey, int]) -> None:
        """Let pushes pass up to these sequences, and no others."""
        self._before()
        self._set(targets, paused=False)

    def pause(self) -> None:
        """Let nothing pass until ``open``."""
        self._before()
        self._set({}, paused=True)

    def open(self) -> None:
        """Let everything pass."""
        self._set(None, paused=False)

    def close(self, error: PsError) -> None:
        """Every waiting and later caller gets ``error``; the first error counts."""
        self.closed = self.closed or error
        self._set(self._targets, paused=self.paused)

    def _set(self, targets: Mapping[WorkerKey, int] | None, *, paused: bool) -> None:
        self._targets, self.paused = targets, paused
        self.engaged = targets is not None or self.closed is not None
        self.notify()

    def check(self) -> None:
        """Raises what the gate was closed with."""
        if self.closed is not None:
            # A copy: the traceback of one that is raised refers to the memory of its callers.
            raise copy(self.closed)

    async def guard(self, submit: Callable[[], Awaitable[T]]) -> T:
        """The result of what ``submit`` begins. Raises what the gate was closed with, before it begins or meanwhile."""
        self.check()
        try:
            result = await submit()
        except Exception:
            self.check()
            raise
        self.check()
        return result

    async def pass_push(self, push: PushInfo) -> bool:
        """Returns when this push may be decided; False: some of a combined push's workers may pass, and others may not.

        Raises what the gate was closed with.
        """

        def passing() -> list[bool]:
            targets = self._targets
            return [targets is None or each.sequence <= targets.get(each.worker, 0) for each in push.contributions]

        await self.until(lambda: any(passing()))
        return all(passing())

    async def opened(self) -> None:
        """Returns when everything may pass. Raises what the gate was closed with."""
        await self.until(lambda: self._targets is None)

    async def closing(self) -> None:
        """Raises what closes the gate, when it is closed."""
        await self.until(lambda: False)

    async def until(self, true: Callable[[], bool]) -> None:
        """Returns when ``true()`` is so, which is asked after each ``notify``. Raises what the gate was closed with."""
        await self._conditions.until(lambda: self.closed is not None or true())
        self.check()

    def notify(self) -> None:
        """The gate or the model has changed."""
        self._conditions.wake()
