"""Has torch's optimizers do without torch's compiler in a process that compiles nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"

#: What ``torch._disable_dynamo`` calls in place of a method, once it is set.
_MARK = "__dynamo_disable"


def load_compiler_late(optimizer: type) -> None:
    """Methods of ``optimizer``, which is torch.optim.Optimizer, run as written until the compiler is loaded.

    Torch keeps its compiler out of some of these methods (``torch._disable_dynamo``), and loads it to do so: their
    first call imports 800 modules, for more than a second. Whatever compiles imports them before, and from then on the
    methods are torch's own again. Where torch does this in another way nothing is changed.
    """
    if COMPILER in sys.modules or any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        return
    kept = [method for method in vars(optimizer).values() if _keeps_out(method)]
    written: list[Callable[..., Any]] = [method.__wrapped__ for method in kept]
    for method in written:
        setattr(method, _MARK, method)
    sys.meta_path.insert(0, _WhenLoaded(written))


def _keeps_out(method: object) -> bool:
    return isinstance(method, FunctionType) and method.__globals__["__name__"] == "torch._compile"


class _WhenLoaded:
    """Asked for each module that is imported; finds none."""

    def __init__(self, methods: Sequence[Callable[..., Any]]) -> None:
        self._methods = methods

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Before the compiler is loaded its methods become torch's own."""
        if name == COMPILER:
            # Not removed from the list, over which an import goes now.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            for method in self._methods:
                delattr(method, _MARK)
