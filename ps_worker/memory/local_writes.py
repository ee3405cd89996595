"""Finds the values of a model that the user has set since the cluster's values were published to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import torch

from ps_worker.model.bindings import Bindings

_WHOLE_PROBES = 3
"""First steps in which all values are checked: code that sets values mostly does so in every step."""

_PROBE_EVERY = 32
_PROBE_BYTES = 4 << 20
_PROBE_VARIABLES = 64
"""Values checked later, in one step of 32: less than 1 % of the steps' time for models of any size."""

_VERSION = attrgetter("_version")

_INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class WrittenValues:
    """Used by the model's FlatModel, in the training thread.

    A write to a parameter itself raises its version: ``copy_``, ``load_state_dict``, ``torch.nn.init``, ``max_norm``.
    Versions are compared in every step. A write through ``param.data`` or numpy does not raise it. For these, sums of
    the values are compared: of all parameters in the first steps, then of some in turn, and in every step for a
    parameter in which such a write was found once. Parameters with memory of their own are compared with the received
    values, element by element.
    """

    def __init__(self, bindings: Bindings, received: Sequence[torch.Tensor], apart: Sequence[int]) -> None:
        """``received``: the memory that each parameter's values are in as received: its own, but for those ``apart``.

        The owner may put other memory in its place.
        """
        self._bindings = bindings
        self._parameters = bindings.parameters
        self._received = received
        #: Shared with the owner, who adds to it.
        self._apart = apart
        self._versions: list[int] | None = None
        self._buffers: list[tuple[int, int]] = []
        self._published = 0
        self._next = 0
        #: Sums of the values published last, by number.
        self._sums: dict[int, int] = {}
        #: Parameters that have been written without a new version.
        self._watched: set[int] = set()

    def parameters_published(self) -> None:
        """The parameters are the cluster's now."""
        self._versions = list(map(_VERSION, self._parameters))
        probed = self._watched.union(self._window()) if self._watched else self._window()
        self._sums = self._summed(probed) if probed else {}
        self._published += 1

    def found(self) -> tuple[int, ...]:
        """Numbers of the parameters that were written since; none before the first publication."""
        if self._versions is None:
            return ()
        versions = list(map(_VERSION, self._parameters))
        if versions == self._versions and not self._sums and not self._apart:
            return ()
        written = {n for n, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then}
        past = {n for n, total in self._summed(set(self._sums) - written).items() if total != self._sums[n]}
        past.update(n for n in self._apart if n not in written and not self._is_received(n))
        self._watched |= past
        return tuple(sorted(written | past))

    def buffers_published(self) -> None:
        """The buffers are the cluster's now, or are being pushed."""
        self._buffers = self._buffer_versions()

    def changed_buffers(self) -> tuple[int, ...]:
        """Numbers of the variables that are buffers and have changed since."""
        first = len(self._parameters)
        now = self._buffer_versions()
        return tuple(first + n for n, each in enumerate(now) if n >= len(self._buffers) or each != self._buffers[n])

    def _buffer_versions(self) -> list[tuple[int, int]]:
        values = self._bindings.buffer_values()
        return [(value.data_ptr(), value._version) for value in values]

    def _is_received(self, number: int) -> bool:
        return torch.equal(self._parameters[number].detach(), self._received[number])

    def _window(self) -> Sequence[int]:
        """The parameters whose values are checked this time."""
        if self._published < _WHOLE_PROBES:
            return range(len(self._parameters))
        if self._published % _PROBE_EVERY or not self._parameters:
            return ()
        chosen: list[int] = []
        left = _PROBE_BYTES
        while left > 0 and len(chosen) < min(len(self._parameters), _PROBE_VARIABLES):
            chosen.append(self._next)
            left -= self._parameters[self._next].nbytes
            self._next = (self._next + 1) % len(self._parameters)
        return chosen

    def _summed(self, numbers: Iterable[int]) -> dict[int, int]:
        """The sum of each parameter's bytes as integers."""
        sums: dict[int, int] = {}
        elsewhere: list[int] = []
        for number in numbers:
            if number in self._apart:
                continue
            if (values := self._received[number]).device.type == "cpu":
                sums[number] = int(np.add.reduce(_as_words(values).numpy(), dtype=np.int64))
            else:
                elsewhere.append(number)
        if elsewhere:
            # One wait for the devices, not one for each.
            totals = [_as_words(self._received[n]).sum(dtype=torch.int64) for n in elsewhere]
            sums.update(zip(elsewhere, torch.stack([total.cpu() for total in totals]).tolist(), strict=True))
        return sums


def _as_words(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as int64 words; where its size is odd, as integers as wide as its elements."""
    flat = values.reshape(-1)
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 else _INTEGERS[flat.element_size()])
