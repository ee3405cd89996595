"""Optimizer classes of users that shards run. A class is registered on both sides, and only its name is sent.

A class is known when the module that registers it has been imported: by the script, as an entry point of an installed
package in the group ``torch_ps.optimizers``, or because ``--optimizers`` or ``PS_OPTIMIZERS`` names it. What comes over
the network is looked up here and imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, TypeVar

from ps_protocol.errors import ConfigError
from ps_protocol.model.optimizers import SHAPED

C = TypeVar("C", bound=type)

ENTRY_POINTS = "torch_ps.optimizers"
"""The group of entry points, each the module that registers classes."""

ENVIRONMENT = "PS_OPTIMIZERS"
"""Modules that register classes, separated by commas."""


@dataclass(frozen=True, slots=True)
class RegisteredOptimizer:
    """One class, as its author registered it."""

    #: Module and qualified name: what is sent.
    name: str
    #: A subclass of torch.optim.Optimizer.
    torch_class: type[Any]
    #: It treats every element alike, so that it may be given flat memory of many variables, and parts of them.
    elementwise: bool


_known: dict[str, RegisteredOptimizer] = {}
_loaded: set[str] = set()


def register(*, elementwise: bool) -> Callable[[C], C]:
    """Register an optimizer class for shards, as a decorator or as a call: ``register(elementwise=True)(Lion)``.

    Args:
        elementwise: The update of an element depends only on the value, gradient and state of that element, and on
            numbers that are the same for all elements of a parameter. Shards may then step flat memory of many
            variables at once, and split variables. False: variables are placed whole, and stepped one by one in their
            shapes.

    Returns:
        A decorator that returns the class unchanged. ``ps_worker.optimizers.check`` tests what else shards need.

    Raises:
        ConfigError: Another process cannot import the class, since it is one of a script or of a function; or the name
            is taken.
    """

    def registered(torch_class: C) -> C:
        name = name_of(torch_class)
        if torch_class.__module__ == "__main__" or "<locals>" in name or name.startswith("torch.optim."):
            raise ConfigError(
                f"{name} cannot be registered for shards",
                expected="a class of your own, at the top of a module that shards import",
                actual=name,
                remedy="put it into a module of its own, and name that with --optimizers or an entry point",
            )
        before = _known.get(name)
        if before is not None and before.elementwise != elementwise:
            raise ConfigError(
                f"{name} is registered twice, differently",
                expected=f"elementwise={before.elementwise}",
                actual=f"elementwise={elementwise}",
                remedy="register a class once",
            )
        _known[name] = RegisteredOptimizer(name, torch_class, elementwise)
        return torch_class

    return registered


def name_of(torch_class: type) -> str:
    """The name that a class is registered under."""
    return f"{torch_class.__module__}.{torch_class.__qualname__}"


def registered_optimizer(name: str) -> RegisteredOptimizer | None:
    """The class of this name; None: nobody has registered it."""
    return _known.get(name)


def reads_shapes(name: str) -> bool:
    """Whether the optimizer of this name, torch's or registered, has its variables whole, in their shapes."""
    known = _known.get(name)
    return name in SHAPED if known is None else not known.elementwise


def registered_names() -> list[str]:
    """The names of all registered classes."""
    return sorted(_known)


def load_modules(modules: Iterable[str]) -> None:
    """Import ``modules``, each once, which register classes. Raises ConfigError for one that cannot be imported."""
    for module in modules:
        _load(module, module, partial(importlib.import_module, module))


def load_entry_points() -> None:
    """Import what installed packages have in the group. Raises ConfigError for one that cannot be imported."""
    for point in entry_points(group=ENTRY_POINTS):
        _load(f"entry point {point.value}", f"entry point '{point.name}' of {ENTRY_POINTS}", point.load)


def named_modules(text: str) -> list[str]:
    """The modules that the value of ``ENVIRONMENT`` lists."""
    return [module for each in text.split(",") if (module := each.strip())]


def _load(key: str, what: str, load: Callable[[], object]) -> None:
    if key in _loaded:
        return
    try:
        load()
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be imported, which is to register optimizers",
            actual=f"{type(error).__name__}: {error}"[:300],
            remedy="install its package here, or take it out",
        ) from error
    _loaded.add(key)
