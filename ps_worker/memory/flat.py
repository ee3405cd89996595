"""Owns the flat memory that a model's parameters are views of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Range, aligned
from ps_protocol.model.spec import Kind, ShardMap
from ps_worker.memory.blocks import HOST, FlatMemory
from ps_worker.memory.double_buffer import DoubleBuffer
from ps_worker.memory.local_writes import Step, WrittenValues
from ps_worker.memory.plan import FlatPlan
from ps_worker.memory.users import can_count_users
from ps_worker.model.bindings import Bindings


class FlatModel:
    """Called from the training thread only.

    ``param.data`` of every bound parameter becomes a view of ``parameters`` (as DDP and FSDP do) with a storage of its
    own, values kept. A parameter that is not contiguous (channels_last, transposed) keeps its own memory, and so does
    one that is given other memory later (``flatten_parameters``, ``param.data = …``, ``share_memory``). Those are
    copied, as are buffers, which remain the user's tensors. Flat memory is allocated once, here.

    With ``doubled``, parameters arrive in the back memory of a DoubleBuffer and become views of it.
    """

    def __init__(self, bindings: Bindings, shard_map: ShardMap, *, doubled: bool = False) -> None:
        """``doubled`` has no effect if parameters are on a device, or if this torch cannot count a tensor's users."""
        self.plan = FlatPlan(shard_map)
        self._bindings = bindings
        devices = bindings.devices
        homes: dict[torch.device, list[Range]] = {}
        for number in sorted(range(len(devices)), key=self.plan.offsets.__getitem__):
            begin = self.plan.offsets[number]
            end = aligned(begin + self.plan.variables[number].nbytes)
            homes.setdefault(devices[number], []).append((begin, end))
        #: Whether some of it is used on other devices.
        self.is_mirrored = any(device != HOST for device in devices)
        #: Whether the model has persistent buffers.
        self.has_buffers = bool(bindings.buffers)
        total_bytes = self.plan.total_bytes
        both = None
        if doubled and not self.is_mirrored and can_count_users():
            both = torch.empty(2 * total_bytes, dtype=torch.uint8).zero_()
        self.parameters = FlatMemory(total_bytes, homes, own=None if both is None else both[:total_bytes])
        views = [
            self.parameters.view(device, begin, variable.dtype, variable.shape)
            for device, begin, variable in zip(devices, self.plan.offsets, self.plan.variables, strict=True)
        ]
        count = len(bindings.parameters)
        self._views, self._buffer_views = views[:count], views[count:]
        #: Numbers of the parameters with memory of their own.
        self._apart: list[int] = []
        self._bind()
        #: None: received values are written to ``parameters``.
        self.double: DoubleBuffer | None = None
        if both is not None:
            self.double = DoubleBuffer(
                self.plan, both, self.parameters, bindings.parameters, self._views, self._addresses, self._apart
            )
        self._written = WrittenValues(bindings, self.plan, self.parameters, self._views, self._apart, self.double)
        #: Whether other code has moved storages (``share_memory``); it may have moved those of gradients too.
        self.has_moved_storages = False

    @torch.no_grad()
    def _bind(self) -> None:
        if self._views:
            torch._foreach_copy_(self._views, [p.detach() for p in self._bindings.parameters])
        for number, (parameter, view) in enumerate(zip(self._bindings.parameters, self._views, strict=True)):
            if parameter.is_contiguous():
                parameter.data = view
            else:
                self._apart.append(number)
        self._addresses = [p.data_ptr() for p in self._bindings.parameters]

    def lay_out(self, shard_map: ShardMap) -> None:
        """Use the layout after slices have moved between shards; all values stay in place."""
        self.plan = FlatPlan(shard_map, self.plan)
        if self.double:
            self.double.lay_out(self.plan)

    def check_buffers(self) -> None:
        """Raises InvalidRequest for a buffer whose shape has changed."""
        if self._buffer_views:
            self._bindings.buffer_values()

    def check_in_place(self) -> None:
        """Let parameters with other memory keep it. Raises InvalidRequest if dtype, shape or device has changed."""
        if list(map(torch.Tensor.data_ptr, self._bindings.parameters)) != self._addresses:
            self._detach_moved()

    def written(self, *, on_devices: bool = True) -> tuple[int, ...]:
        """Numbers of the variables that the user has written since publication. Raises as ``check_in_place``.

        Without those ``on_devices`` it does not wait for devices unless it finds some; ``written_on_devices`` finds the
        rest.
        """
        self.check_in_place()
        found = self._written.found()
        if self.is_mirrored and (found or on_devices):
            return tuple(sorted({*found, *self._written.on_devices()}))
        return found

    @property
    def unsure(self) -> frozenset[int]:
        """Of the variables that ``written`` found last, those whose values may be unchanged."""
        return self._written.unsure

    def watch(self, numbers: Iterable[int]) -> None:
        """Compare all values of these variables in every step from now on."""
        self._written.watch(numbers)

    def written_on_devices(self) -> tuple[int, ...]:
        """The variables that ``written`` left out. From any thread, before the second next call of ``written``."""
        return self._written.on_devices() if self.is_mirrored else ()

    def mark_published(self) -> None:
        """Note that all current values of the module are the cluster's."""
        self._written.parameters_published()
        self._written.buffers_published()

    def is_untrained(self, number: int) -> bool:
        """Whether the parameter of this number has no gradient, so that the next step does not change it."""
        return self._bindings.parameters[number].grad is None

    def values_of(self, number: int) -> torch.Tensor:
        """The module's current values of the parameter of this number."""
        return self._bindings.parameters[number].detach()

    @torch.no_grad()
    def collect_values(self) -> None:
        """Copy the module's current parameters and buffers to host memory, to upload them."""
        self._copy_apart(self._views, self._bindings.parameters)
        if self._buffer_views:
            torch._foreach_copy_(self._buffer_views, self._bindings.buffer_values())
        self.parameters.to_host((0, self.plan.total_bytes))

    def pieces(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Host memory of the values that the model uses at ``ranges``."""
        return self.double.fronts(ranges) if self.double else self.parameters.pieces(ranges)

    def forget_arrived(self, shard: int) -> None:
        """Drop unpublished values from ``shard``: newer ones are about to be written to ``pieces``."""
        if self.double:
            self.double.forget(shard)

    def host_tensors(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Host memory at ``ranges`` as flat tensors of bytes, to be written."""
        if self.is_mirrored:
            self.parameters.wait()
        return [self.parameters.host[begin:end] for begin, end in ranges]

    def publish_parameters(self, step: Step | None = None) -> None:
        """Make received parameters the module's, and let autograd know that they changed in place.

        ``step``: the worker's step that they follow; None: that of the last publication.
        """
        if self.is_mirrored:
            self.parameters.to_devices(self._span(Kind.PARAMETER))
        if self.double:
            self.double.land()
        if self._apart:
            self._copy_apart(self._bindings.parameters, self._views)
        torch.autograd.graph.increment_version(self._bindings.parameters)
        self._written.parameters_published(step)

    @torch.no_grad()
    def publish_buffers(self) -> None:
        """Copy received buffers into the module."""
        if self._buffer_views:
            self.parameters.to_devices(self._span(Kind.BUFFER))
            torch._foreach_copy_(self._bindings.buffer_values(), self._buffer_views)
        self._written.buffers_published()

    def buffers_sent(self) -> None:
        """Note that the module's current buffers are being pushed."""
        self._written.buffers_published()

    def changed_buffers(self) -> tuple[int, ...]:
        """Numbers of the buffers that may have changed since they were sent or published."""
        return self._written.changed_buffers()

    def _copy_apart(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if not self._apart:
            return
        with torch.no_grad():
            torch._foreach_copy_([targets[n] for n in self._apart], [sources[n] for n in self._apart])

    def _span(self, kind: Kind) -> Range:
        """The bytes of all arenas of ``kind``; they are neighbours."""
        spans = [span for key, span in self.plan.arenas if key.kind is kind]
        return (spans[0][0], spans[-1][1]) if spans else (0, 0)

    def _detach_moved(self) -> None:
        for number, (parameter, view) in enumerate(zip(self._bindings.parameters, self._views, strict=True)):
            if parameter.data_ptr() == self._addresses[number]:
                continue
            if (parameter.device, parameter.dtype, parameter.shape) != (view.device, view.dtype, view.shape):
                raise InvalidRequest(
                    "a parameter was moved or converted after cluster.optimizer(...) had placed it",
                    variable=self.plan.variables[number].name,
                    remedy="call model.to(...), .half() and the like before cluster.optimizer(...)",
                )
            if number not in self._apart:
                if view.data_ptr() != self._addresses[number]:
                    # Not only the parameter has other memory: its storage has, and so has the view.
                    memory = self.double.memories[number in self.double.turned] if self.double else self.parameters
                    begin, variable = self.plan.offsets[number], self.plan.variables[number]
                    self._views[number] = memory.view(view.device, begin, variable.dtype, variable.shape)
                    self.has_moved_storages = True
                self._apart.append(number)
            self._addresses[number] = parameter.data_ptr()
