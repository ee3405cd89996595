"""Owns the flat memory that a model's parameters are views of."""

from __future__ import annotations

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import Range
from ps_protocol.model import Kind, ShardMap
from ps_worker.bindings import Bindings
from ps_worker.memory import FlatMemory
from ps_worker.plan import FlatPlan


class FlatModel:
    """Called from the training thread only.

    ``param.data`` of every bound parameter becomes a view of ``parameters`` (as DDP and FSDP do), values kept. Buffers
    stay the user's own tensors and are copied. Memory is allocated once, here.
    """

    def __init__(self, bindings: Bindings, shard_map: ShardMap) -> None:
        self.plan = FlatPlan(shard_map)
        self._bindings = bindings
        devices = bindings.devices
        homes: dict[torch.device, list[Range]] = {}
        for number in sorted(range(len(devices)), key=self.plan.offsets.__getitem__):
            begin = self.plan.offsets[number]
            homes.setdefault(devices[number], []).append((begin, begin + self.plan.variables[number].nbytes))
        self.parameters = FlatMemory(self.plan.total_bytes, homes)
        views = [
            self.parameters.view(device, begin, variable.dtype, variable.shape)
            for device, begin, variable in zip(devices, self.plan.offsets, self.plan.variables, strict=True)
        ]
        count = len(bindings.parameters)
        self._buffer_views = views[count:]
        self._bind(views[:count])

    @torch.no_grad()
    def _bind(self, views: list[torch.Tensor]) -> None:
        if views:
            torch._foreach_copy_(views, [p.detach() for p in self._bindings.parameters])
        for parameter, view in zip(self._bindings.parameters, views, strict=True):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in views]

    def lay_out(self, shard_map: ShardMap) -> None:
        """Slices have moved between shards; all values stay where they are."""
        self.plan = FlatPlan(shard_map, self.plan)

    @property
    def has_buffers(self) -> bool:
        """Whether the model has persistent buffers."""
        return bool(self._bindings.buffers)

    def check_in_place(self) -> None:
        """Raises InvalidRequest for a parameter that was moved off its memory."""
        if [p.data_ptr() for p in self._bindings.parameters] != self._addresses:
            self._refuse_moved()

    @torch.no_grad()
    def collect_values(self) -> None:
        """Make host memory hold all parameters and buffers as the module has them now, to upload them."""
        if self._buffer_views:
            torch._foreach_copy_(self._buffer_views, self._bindings.buffer_values())
        self.parameters.to_host((0, self.plan.total_bytes))

    def publish_parameters(self) -> None:
        """Make received parameters the module's, and let autograd know that they changed in place."""
        self.parameters.to_devices(self._span(Kind.PARAMETER))
        torch.autograd.graph.increment_version(self._bindings.parameters)

    @torch.no_grad()
    def publish_buffers(self) -> None:
        """Copy received buffers into the module."""
        if self._buffer_views:
            self.parameters.to_devices(self._span(Kind.BUFFER))
            torch._foreach_copy_(self._bindings.buffer_values(), self._buffer_views)

    def _span(self, kind: Kind) -> Range:
        """The bytes of all arenas of ``kind``; they are neighbours."""
        spans = [span for key, span in self.plan.arenas if key.kind is kind]
        return (spans[0][0], spans[-1][1]) if spans else (0, 0)

    def _refuse_moved(self) -> None:
        for number, parameter in enumerate(self._bindings.parameters):
            if parameter.data_ptr() != self._addresses[number]:
                raise InvalidRequest(
                    "a parameter was moved or converted after cluster.optimizer(...) had placed it",
                    variable=self.plan.variables[number].name,
                    remedy="call model.to(...), .half() and the like before cluster.optimizer(...)",
                )
