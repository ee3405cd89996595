"""Stands for Ray where it is not installed: actors whose calls end when a test says so. Only what is used of Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WAIT_SECONDS = 0.01


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause

    def as_instanceof_cause(self) -> Exception:
        return self.cause


class GetTimeoutError(RayError, TimeoutError):
    pass


class Call:
    """One call of an actor's method. It has ended when it has a value or an error."""

    def __init__(self, method: str, arguments: tuple[Any, ...]) -> None:
        self.method = method
        self.arguments = arguments
        self.ended = threading.Event()
        self.outcome: Any = None

    def end(self, outcome: Any) -> None:
        self.outcome = outcome
        self.ended.set()


class Actor:
    """Its calls, in order. Methods of ``at_once`` end at once with that outcome."""

    def __init__(self, fake: FakeRay, arguments: tuple[Any, ...]) -> None:
        self._fake = fake
        self.arguments = arguments
        self.calls: list[Call] = []
        self.killed = False

    def call(self, method: str) -> Call:
        return next(call for call in self.calls if call.method == method)

    def __getattr__(self, method: str) -> Any:
        return _With(remote=lambda *arguments: self._called(method, arguments))

    def _called(self, method: str, arguments: tuple[Any, ...]) -> Call:
        call = Call(method, arguments)
        self.calls.append(call)
        self._fake.log.append(f"{method} {self.arguments[0]}")
        if method in self._fake.at_once:
            call.end(self._fake.at_once[method])
        return call


class _With:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class FakeRay(ModuleType):
    """The module ``ray``."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[Actor] = []
        #: Calls of actors, in order: method and the actor's first argument.
        self.log: list[str] = []
        self.at_once: dict[str, Any] = {"address": "127.0.0.1:7000", "stop": None}

    def remote(self, kind: type) -> Any:
        return _With(options=lambda **options: _With(remote=self._make))

    def _make(self, *arguments: Any) -> Actor:
        actor = Actor(self, arguments)
        self.actors.append(actor)
        return actor

    def wait(self, calls: Sequence[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        if not any(call.ended.is_set() for call in calls):
            threading.Event().wait(_WAIT_SECONDS)
        ended = [call for call in calls if call.ended.is_set()][:num_returns]
        return ended, [call for call in calls if call not in ended]

    def get(self, call: Call, timeout: float | None = None) -> Any:
        if isinstance(call.outcome, Exception):
            raise call.outcome
        return call.outcome

    def kill(self, actor: Actor) -> None:
        actor.killed = True

    def is_initialized(self) -> bool:
        return True


def modules(fake: FakeRay) -> dict[str, ModuleType]:
    """What stands in ``sys.modules`` for Ray."""
    exceptions = ModuleType("ray.exceptions")
    for error in (RayError, RayActorError, RayTaskError, GetTimeoutError):
        setattr(exceptions, error.__name__, error)
    groups = ModuleType("ray.util.placement_group")
    groups.__dict__.update(placement_group=None, remove_placement_group=None)
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.__dict__.update(PlacementGroupSchedulingStrategy=None)
    return {
        "ray": fake,
        "ray.exceptions": exceptions,
        "ray.util": ModuleType("ray.util"),
        "ray.util.placement_group": groups,
        "ray.util.scheduling_strategies": strategies,
    }


def forget() -> dict[str, ModuleType]:
    """Modules that have imported Ray are imported again; returns them."""
    names = [f"ps_worker.ray.{name}" for name in ("cluster", "workers", "servers", "placement")]
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}
