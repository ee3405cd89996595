"""Finds the values of a model that the user has written since the cluster's values were published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_worker.memory.blocks import HOST, FlatMemory
from ps_worker.memory.double_buffer import DoubleBuffer
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.bindings import Bindings

WHOLE_BYTES = 32 << 10
"""Up to this size all values are compared in every step: less than 2 us."""

_SAMPLED_WORDS = 256
_MOST_SAMPLED_WORDS = 4096
_WORDS_PER_SAMPLE = 4096
_OF_EACH = 4
"""Words of 8 bytes that a sample has of a larger model, spread over its size: one of 4096, within the limits; and
these of each variable besides. Less than 1 % of a step at 1 MB and at 100 MB."""

_SAMPLES = 8
"""Samples with other places, taken in turn."""

_KNOWN_TURNED = 4
"""Sets of parameters in the second of two memories whose places are kept; mostly there are two."""

_WHOLE_PROBES = 3
"""First steps in which all values are checked: code that sets values mostly does so in every step."""

_PROBE_EVERY = 32
_PROBE_BYTES = 4 << 20
_PROBE_VARIABLES = 64
"""Variables checked whole later, in one step of 32: less than 1 % of the steps' time for models of any size."""

_WORD_BYTES = 8

_COLUMNS = 1021
"""Sums are of this many columns of words, so that values which change their places change them: a prime."""

_VERSION = attrgetter("_version")

_INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})

Step = tuple[int, int]
"""Phase and clock of a worker. In sync all workers have the same, and check the same places."""


class WrittenValues:
    """Used by the model's FlatModel, in the training thread; ``on_devices`` also in that of an exchange.

    A write to a parameter itself raises its version: ``copy_``, ``load_state_dict``, ``torch.nn.init``, ``max_norm``.
    Versions are compared in every step. A version may rise although the values are the same, because they were replaced
    and restored. If all values or their sums are known, this does not count as a write; else it is ``unsure``. A write
    through ``param.data`` or numpy does not raise it. For these, values are compared in every step: all of a small
    model, a sample of each variable of a larger one, which a write of a whole variable changes. Sums of all values are
    compared in the first steps, then those of some variables in turn, and in every step those of a variable in which
    such a write was found once. Parameters with memory of their own are compared with the received values, element by
    element.
    """

    def __init__(
        self,
        bindings: Bindings,
        plan: FlatPlan,
        memory: FlatMemory,
        received: Sequence[torch.Tensor],
        apart: Sequence[int],
        double: DoubleBuffer | None = None,
    ) -> None:
        """``received``: the memory with each parameter's values as received; its own memory, except for those
        ``apart``.

        The owner may replace entries. ``memory`` contains all values, or ``double`` if there is one.
        """
        self._bindings = bindings
        self._parameters = bindings.parameters
        self._received = received
        #: Shared with the owner, which adds to it.
        self._apart = apart
        self._versions: list[int] | None = None
        self._buffers: list[tuple[int, int]] = []
        self._published = 0
        #: Of the last publication.
        self._step: Step = (0, 0)
        self._memory = memory
        #: Sums of the values published last, by number.
        self._sums: dict[int, object] = {}
        #: Parameters that have been written without a new version, or whose values were put back.
        self._watched: set[int] = set()
        #: Of the parameters found last, those with a new version and unchanged samples: other values may have changed.
        self.unsure: frozenset[int] = frozenset()
        self._offsets = plan.offsets
        self._windows = _windows([p.nbytes for p in bindings.parameters])
        devices = bindings.devices[: len(bindings.parameters)]
        on_host = _Places.of(plan, [n for n, device in enumerate(devices) if device == HOST])
        self._host: _Whole | _Sampled
        self._compares_all = False
        if (
            not double
            and len(on_host.numbers) == len(devices)
            and on_host.end_bytes - on_host.begin_bytes <= WHOLE_BYTES
        ):
            self._host = _Whole(memory, on_host)
            self._compares_all = True
        else:
            self._host = _Sampled(memory, on_host, double)
        self._on_devices = [
            _OnDevice(memory, device, _Places.of(plan, [n for n, other in enumerate(devices) if other == device]))
            for device in dict.fromkeys(devices)
            if device != HOST
        ]

    def parameters_published(self, step: Step | None = None) -> None:
        """Note that the parameters are the cluster's, after ``step``; None: the same step as last time."""
        self._step = step or self._step
        self._versions = list(map(_VERSION, self._parameters))
        self._host.take(self._step[1])
        if self._watched or not self._compares_all:
            probed = self._watched.union(self._window())
            self._sums = self._summed(probed) if probed else {}
        else:
            self._sums = {}
        self._published += 1

    def found(self) -> tuple[int, ...]:
        """Numbers of the parameters written since publication; none before the first publication.

        Without those on devices that only samples detect: call ``on_devices`` afterwards for them.
        """
        if self._versions is None:
            return ()
        for each in self._on_devices:
            each.ask(self._step[1])
        versions = list(map(_VERSION, self._parameters))
        changed = self._host.changed()
        if versions == self._versions and not changed and not self._sums and not self._apart:
            return ()
        written = {n for n, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then}
        sums = self._summed(set(self._sums) - changed)
        past = changed - written
        past |= {n for n, total in sums.items() if n not in written and total != self._sums[n]}
        past.update(n for n in self._apart if n not in written and not self._is_received(n))
        put_back = {n for n in written if self._is_put_back(n, changed, sums)} if written else set()
        self._watched |= past | (put_back & sums.keys())
        written -= put_back
        known = {*changed, *sums, *self._apart}
        self.unsure = frozenset(n for n in written if n not in known and self._received[n].device == HOST)
        return tuple(sorted(written | past))

    def watch(self, numbers: Iterable[int]) -> None:
        """Compare all values of these parameters in every step from now on."""
        self._watched.update(numbers)

    def _is_put_back(self, number: int, changed: set[int], sums: Mapping[int, object]) -> bool:
        """Whether a parameter with a new version is known to have the values that were published."""
        if number in self._apart:
            return self._is_received(number)
        if self._received[number].device != HOST:
            # Exact: the host has the values copied to the device, unless the next ones are arriving.
            begin = self._offsets[number]
            there = self._received[number].cpu().reshape(-1).view(torch.uint8)
            return torch.equal(there, self._memory.host[begin : begin + len(there)])
        if isinstance(self._host, _Whole):
            return number not in changed
        return number in sums and sums[number] == self._sums[number]

    def on_devices(self) -> tuple[int, ...]:
        """Numbers of the parameters on devices that differed when ``found`` was called. Waits for their copies."""
        if self._versions is None:
            return ()
        past = {n for each in self._on_devices for n in each.changed()}.difference(self._apart)
        self._watched |= past
        return tuple(sorted(past))

    def buffers_published(self) -> None:
        """Note that the buffers are the cluster's, or are being pushed."""
        self._buffers = self._buffer_versions()

    def changed_buffers(self) -> tuple[int, ...]:
        """Numbers of the buffer variables that have changed since."""
        first = len(self._parameters)
        now = self._buffer_versions()
        return tuple(first + n for n, each in enumerate(now) if n >= len(self._buffers) or each != self._buffers[n])

    def _buffer_versions(self) -> list[tuple[int, int]]:
        values = self._bindings.buffer_values()
        return [(value.data_ptr(), value._version) for value in values]

    def _is_received(self, number: int) -> bool:
        return torch.equal(self._parameters[number].detach(), self._received[number])

    def _window(self) -> Sequence[int]:
        """The parameters whose values are all checked in this step."""
        if self._compares_all:
            return ()
        if self._published < _WHOLE_PROBES:
            return range(len(self._parameters))
        phase, clock = self._step
        if clock % _PROBE_EVERY or not self._windows:
            return ()
        return self._windows[(phase + clock // _PROBE_EVERY) % len(self._windows)]

    def _summed(self, numbers: Iterable[int]) -> dict[int, object]:
        """The sums of each parameter's bytes as integers: by column; on devices, one in total."""
        sums: dict[int, object] = {}
        elsewhere: list[int] = []
        for number in numbers:
            if number in self._apart:
                continue
            if (values := self._received[number]).device.type == "cpu":
                sums[number] = _column_sums(_as_words(values).numpy())
            else:
                elsewhere.append(number)
        if elsewhere:
            # Wait for the devices once, not for each parameter.
            totals = [_as_words(self._received[n]).sum(dtype=torch.int64) for n in elsewhere]
            sums.update(zip(elsewhere, torch.stack([total.cpu() for total in totals]).tolist(), strict=True))
        return sums


def _column_sums(words: npt.NDArray[Any]) -> bytes:
    whole = len(words) // _COLUMNS * _COLUMNS
    if not whole:
        return words.tobytes()
    sums: npt.NDArray[np.int64] = np.add.reduce(words[:whole].reshape(-1, _COLUMNS), axis=0, dtype=np.int64)
    return sums.tobytes() + words[whole:].tobytes()


@dataclass(frozen=True, slots=True)
class _Places:
    """The positions of variables in flat memory, in words. They begin at multiples of 64 bytes, padded with zeros.

    In the order of their positions, without empty variables.
    """

    numbers: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: FlatPlan, numbers: Iterable[int]) -> _Places:
        chosen = sorted((n for n in numbers if plan.variables[n].nbytes), key=plan.offsets.__getitem__)
        begins = np.array([plan.offsets[n] for n in chosen], np.int64)
        sizes = np.array([plan.variables[n].nbytes for n in chosen], np.int64)
        return cls(np.array(chosen, np.int64), begins // _WORD_BYTES, -(-sizes // _WORD_BYTES))

    @property
    def end_bytes(self) -> int:
        """The end of the last variable."""
        return int((self.first[-1] + self.words[-1]) * _WORD_BYTES) if len(self.first) else 0

    @property
    def begin_bytes(self) -> int:
        """The beginning of the first variable."""
        return int(self.first[0] * _WORD_BYTES) if len(self.first) else 0

    def samples(self) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Ascending word positions, and for each the index of its variable here. The same in every process."""
        total = int(self.words.sum())
        wanted = min(max(total // _WORDS_PER_SAMPLE, _SAMPLED_WORDS), _MOST_SAMPLED_WORDS)
        counts = np.minimum(self.words, _OF_EACH + wanted * self.words // max(1, total))
        owners = np.repeat(np.arange(len(counts)), counts)
        # One word in each of as many equal parts of a variable, spread evenly by multiples of irrational numbers.
        part = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes, each = self.words[owners], self.words[owners] / counts[owners]
        within = [(part * 0.6180339887498949 + number * 0.7548776662466927) % 1.0 for number in range(_SAMPLES)]
        at = [((part + fraction) * each).astype(np.int64) for fraction in within]
        return [(self.first[owners] + np.minimum(places, sizes - 1), owners) for places in at]


def _words_of(memory: torch.Tensor) -> npt.NDArray[np.int64]:
    whole = len(memory) // _WORD_BYTES * _WORD_BYTES
    words: npt.NDArray[np.int64] = memory[:whole].numpy().view(np.int64)
    return words


class _Whole:
    """All bytes of small parameters."""

    def __init__(self, memory: FlatMemory, places: _Places) -> None:
        self._places = places
        self._now = memory.bytes[places.begin_bytes : places.end_bytes]
        self._then = bytearray(len(self._now))
        self._taken = memoryview(self._then)

    def take(self, _: int) -> None:
        self._taken[:] = self._now

    def changed(self) -> set[int]:
        """Numbers of the parameters whose bytes have changed since they were recorded."""
        if self._then == self._now:  # bytes compare at once; two memoryviews do not
            return set()
        begins = self._places.first * _WORD_BYTES - self._places.begin_bytes
        ends = begins + self._places.words * _WORD_BYTES
        spans = zip(self._places.numbers.tolist(), map(slice, begins.tolist(), ends.tolist()), strict=True)
        return {number for number, part in spans if self._then[part] != self._now[part]}


class _Sampled:
    """Some words of each parameter on the host."""

    def __init__(self, memory: FlatMemory, places: _Places, double: DoubleBuffer | None) -> None:
        self._numbers = places.numbers
        samples = places.samples()
        self._owners = samples[0][1]
        self._double = double
        self._words = _words_of(double.both if double else memory.host)
        self._each = [at for at, _ in samples]
        #: With two memories, the positions of the samples while these parameters are in the second.
        self._turned: dict[frozenset[int], list[npt.NDArray[np.int64]]] = {frozenset(): self._each}
        self._places = self._each[0]
        self._then = b""

    def take(self, clock: int) -> None:
        if self._double:
            turned = frozenset(self._double.turned)
            self._each = self._turned.get(turned) or self._found_turned(turned, self._double.second_begin)
        self._places = self._each[clock % _SAMPLES]
        self._then = self._words[self._places].tobytes()

    def changed(self) -> set[int]:
        """Numbers of the parameters whose sampled words have changed since they were recorded."""
        now = self._words[self._places]
        if now.tobytes() == self._then:
            return set()
        differ = now != np.frombuffer(self._then, np.int64)
        return set(self._numbers[self._owners[differ]].tolist())

    def _found_turned(self, turned: frozenset[int], second_begin: int) -> list[npt.NDArray[np.int64]]:
        plain = self._turned[frozenset()]
        if len(self._turned) > _KNOWN_TURNED:
            self._turned = {frozenset(): plain}
        shifts = np.isin(self._numbers, list(turned)) * (second_begin // _WORD_BYTES)
        found = self._turned[turned] = [at + shifts[self._owners] for at in plain]
        return found


class _OnDevice:
    """Some words of each parameter on a device, compared with host memory, from which the device got its values.

    Only ``changed`` waits for the device.
    """

    def __init__(self, memory: FlatMemory, device: torch.device, places: _Places) -> None:
        self._numbers = places.numbers
        self._samples = places.samples()
        self._host = _words_of(memory.host)
        self._words, moved = memory.on_device(device, [int(first) * _WORD_BYTES for first in places.first])
        shifts = np.array(moved, np.int64) // _WORD_BYTES - places.first
        self._there = [torch.from_numpy(at + shifts[owners]).to(device) for at, owners in self._samples]
        is_cuda = device.type == "cuda"
        # If exchanges overlap, the last copy is read while the next is queued.
        self._answers = [torch.empty(len(self._samples[0][0]), dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._device = device
        self._came = [torch.cuda.Event() if is_cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._asked = 0
        #: For each copy, the host's words when it was queued, and the parameters' indexes here.
        self._expected = [(self._host[at], owners) for at, owners in self._samples[:2]]

    def ask(self, clock: int) -> None:
        """Queue a copy of the device's words."""
        self._asked = asked = 1 - self._asked
        at = clock % _SAMPLES
        places, owners = self._samples[at]
        self._expected[asked] = self._host[places], owners
        self._answers[asked].copy_(self._words.index_select(0, self._there[at]), non_blocking=True)
        if (came := self._came[asked]) is not None:
            came.record(torch.cuda.current_stream(self._device))

    def changed(self) -> set[int]:
        """Numbers of the parameters that differed from the host's when the copy was queued."""
        asked = self._asked
        if (came := self._came[asked]) is not None:
            came.synchronize()
        expected, owners = self._expected[asked]
        differ = self._answers[asked].numpy() != expected
        return set(self._numbers[owners[differ]].tolist())


def _windows(sizes: Sequence[int]) -> list[list[int]]:
    """Groups of parameters, by number, that are checked whole in the same step."""
    windows: list[list[int]] = []
    left = 0
    for number, nbytes in enumerate(sizes):
        if left <= 0 or len(windows[-1]) == _PROBE_VARIABLES:
            windows.append([])
            left = _PROBE_BYTES
        windows[-1].append(number)
        left -= nbytes
    return windows


def _as_words(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as int64 words; if its size is no multiple of 8, as integers of its element
    size.
    """
    flat = values.reshape(-1)
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 else _INTEGERS[flat.element_size()])
