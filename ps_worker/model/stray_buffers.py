"""Warns of buffers that training changes and that belong to no model of the cluster."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ps_worker.model.bindings import BufferRef, persistent_buffers

_NAMED = 3
"""Buffers that the warning lists by name."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A buffer, without a strong reference to its module, and its version when it was seen."""

    name: str
    owner: weakref.ref[torch.nn.Module]
    key: str
    version: int


class StrayBuffers:
    """Used by one optimizer, in its training thread."""

    def __init__(self, seen: Iterable[_Seen]) -> None:
        self._seen = list(seen)

    @classmethod
    def around(cls, parameters: Sequence[torch.Tensor]) -> StrayBuffers:
        """Buffers of the modules that have any of ``parameters``, found among all modules of this process.

        ``model.parameters()`` names no module. Looking through the objects of a process takes about 0.2 s per million.
        """
        wanted = {id(parameter) for parameter in parameters}
        modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        modules = [module for module in modules if _is_whole(module)]
        inner = {id(child) for module in modules for child in module.children()}
        found: dict[int, _Seen] = {}
        for root in modules:
            if id(root) not in inner and any(id(parameter) in wanted for parameter in root.parameters()):
                buffers = ((name, ref) for name, ref in persistent_buffers(root) if not ref.value.is_inference())
                found.update((id(ref.value), _seen(name, ref)) for name, ref in buffers)
        return cls(found.values())

    def warn(self, logger: logging.Logger) -> None:
        """Warn of those that have been written to since, as BatchNorm's statistics are."""
        # All of a module's: torch counts BatchNorm's writes to num_batches_tracked, and not those to its statistics.
        owners = [each.owner() for each in self._seen if _has_changed(each)]
        changed = [each.name for each in self._seen if any(each.owner() is owner for owner in owners)]
        if changed:
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            logger.warning(
                "training changes the buffers %s%s, which belong to no model of the cluster: each worker keeps its "
                "own; pass module=model to cluster.optimizer(...) with the parameters, or, if this is meant, "
                'buffers="local"',
                ", ".join(changed[:_NAMED]),
                more,
            )


def _is_whole(module: torch.nn.Module) -> bool:
    """Whether its parts can be listed. Modules of others are looked at, too, and a constructor may have failed."""
    try:
        for part in module.modules():
            next(part.parameters(recurse=False), None)
    except Exception:  # noqa: BLE001 -- whatever a module's own methods raise
        return False
    return True


def _seen(name: str, reference: BufferRef) -> _Seen:
    return _Seen(name, weakref.ref(reference.owner), reference.key, reference.value._version)


def _has_changed(seen: _Seen) -> bool:
    owner = seen.owner()
    value = owner._buffers.get(seen.key) if owner is not None else None
    return value is not None and not value.is_inference() and value._version != seen.version
