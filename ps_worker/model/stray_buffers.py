"""Warns of buffers that training changes and the cluster does not share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from ps_protocol.logs import EventLogger
from ps_worker.model.bindings import Bindings, BufferRef, persistent_buffers

logger = EventLogger("ps_worker")

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

    def warn(self) -> None:
        """Warn of buffers that were written since, such as BatchNorm's statistics."""
        # Report all buffers of a module: torch counts BatchNorm's writes to num_batches_tracked, not to its statistics.
        owners = [each.owner() for each in self._seen if _has_changed(each)]
        changed = [each.name for each in self._seen if any(each.owner() is owner for owner in owners)]
        if changed:
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            logger.warning(
                "model.options",
                "training changes the buffers %s%s, which belong to no model of the cluster: each worker keeps its "
                "own; pass module=model to cluster.optimizer(...) with the parameters, or, if this is meant, "
                'buffers="local"',
                ", ".join(changed[:_NAMED]),
                more,
            )


class ForwardWritten:
    """Finds the buffers that are written between a model's first two steps. Used in its training thread.

    Statistics of torch's own modules are not reported: each worker is known to have its own.
    """

    def __init__(self, model: str, bindings: Bindings, chosen: Container[str]) -> None:
        """``chosen``: names of buffers whose policy the user has chosen; they are not reported."""
        self._model = model
        named = zip(bindings.variables[len(bindings.parameters) :], bindings.buffers, strict=True)
        self._watched = {
            variable.name: reference
            for variable, reference in named
            if variable.name not in chosen
            and reference.value.numel() > 1  # counters are alike
            and (type(reference.owner) is torch.nn.Module or not _is_torchs(reference.owner))
        }
        self._values: dict[str, torch.Tensor] | None = None

    def look(self, workers: int) -> bool:
        """Look before a step of ``workers`` workers. Returns whether to look again."""
        if self._values is None:
            self._values = {name: reference.value.clone() for name, reference in self._watched.items()}
            return bool(self._values)
        values, self._values = self._values, {}
        pairs = [(name, value, self._watched[name].value) for name, value in values.items()]
        written = [n for n, then, now in pairs if then.device != now.device or not torch.equal(then, now)]
        if written and workers > 1:
            logger.warning(
                "model.options",
                "model '%s': forward writes the buffers %s%s: each worker has its own, until a barrier brings those of "
                "rank 0; where training reads them, write them from what all workers have (cluster.all_reduce), and "
                'choose by name which are kept: buffers={"%s": "local"}, or "rank0"',
                self._model,
                ", ".join(written[:_NAMED]),
                f" and {len(written) - _NAMED} more" if len(written) > _NAMED else "",
                written[0],
            )
        return False


def _is_torchs(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_whole(module: torch.nn.Module) -> bool:
    """Whether its submodules and buffers can be listed. The search finds all modules, also one whose constructor
    failed.
    """
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
