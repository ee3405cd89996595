"""``optimizer.state`` of an optimizer whose state is on the shards: read on demand, never written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from ps_protocol.errors import UnsupportedOptimizer

#: Returns the current state of a parameter; None if the optimizer does not have it.
Read = Callable[[torch.Tensor], Mapping[str, Any] | None]


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UnsupportedOptimizer(
        "optimizer.state cannot be written on a worker: the optimizer's state is on the shards",
        remedy="change what optimizer.state_dict() gives, and pass it to optimizer.load_state_dict(...)",
    )


class ReadState(dict[str, Any]):
    """A copy of one parameter's state. Writes raise UnsupportedOptimizer, since they would not reach the shards."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse


class StateOnShards(defaultdict[Any, Any]):
    """Reads the state of one parameter by key; has no entries of its own. Used in the training thread.

    ``state[p]``, ``state.get(p)`` and ``p in state`` ask the shards and raise PsError. Iteration finds nothing: all
    state is in ``state_dict()``. Writes raise UnsupportedOptimizer.
    """

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, key: object) -> ReadState:
        """Raises UnsupportedOptimizer if the optimizer does not have this parameter."""
        found: ReadState | None = self.get(key)
        if found is None:
            raise UnsupportedOptimizer(
                "optimizer.state has the state of the optimizer's own parameters only",
                expected="a parameter of one of its groups",
                actual=f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else type(key).__name__,
                remedy="read the optimizer that has this parameter",
            )
        return found

    def get(self, key: object, default: Any = None) -> Any:
        """The current state of a parameter; ``default`` if the optimizer does not have it."""
        found = self._read(key) if isinstance(key, torch.Tensor) else None
        return default if found is None else ReadState(found)

    def __contains__(self, key: object) -> bool:
        return bool(self.get(key))

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse
