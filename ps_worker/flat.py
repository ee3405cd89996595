"""Owns a model's flat memory: its parameters are views of it, its gradients are gathered into it."""

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

    ``param.data`` of every bound parameter becomes a view of ``parameters`` (as DDP and FSDP do), values kept.
    Gradients and buffers stay the user's own tensors and are copied. Memory is allocated once, here.
    """

    def __init__(self, bindings: Bindings, shard_map: ShardMap, *, gradients: bool = True) -> None:
        self.plan = FlatPlan(shard_map)
        self._bindings = bindings
        self.parameters = FlatMemory(self.plan.total_bytes, bindings.device)
        #: What is pushed: gradients, and the values of buffers. The same memory as ``parameters`` for a mere reader.
        self.gradients = FlatMemory(self.plan.total_bytes, bindings.device) if gradients else self.parameters
        count = len(bindings.parameters)
        self._gradient_views = self._views(self.gradients)[:count]
        views = self._views(self.parameters)
        self._buffer_views = views[count:]
        self._pushed_buffer_views = self._views(self.gradients)[count:]
        self._bind(views[:count])

    def _views(self, memory: FlatMemory) -> list[torch.Tensor]:
        variables = self.plan.variables
        return [memory.view(at, v.dtype, v.shape) for at, v in zip(self.plan.offsets, variables, strict=True)]

    @torch.no_grad()
    def _bind(self, views: list[torch.Tensor]) -> None:
        if views:
            torch._foreach_copy_(views, [p.detach() for p in self._bindings.parameters])
        for parameter, view in zip(self._bindings.parameters, views, strict=True):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in views]

    @property
    def has_buffers(self) -> bool:
        """Whether the model has persistent buffers."""
        return bool(self._bindings.buffers)

    @torch.no_grad()
    def collect_gradients(self) -> tuple[int, ...]:
        """Copy every ``param.grad`` into flat memory; returns the numbers of the variables that have none.

        Raises InvalidRequest for a sparse gradient and for a parameter that was moved off its memory.
        """
        parameters = self._bindings.parameters
        if [p.data_ptr() for p in parameters] != self._addresses:
            self._refuse_moved()
        grads = [p.grad for p in parameters]
        present = [g for g in grads if g is not None]
        if any(g.is_sparse for g in present):
            self._refuse_sparse()
        absent: tuple[int, ...] = ()
        views = self._gradient_views
        if len(present) < len(grads):
            absent = tuple(i for i, g in enumerate(grads) if g is None)
            views = [view for view, g in zip(views, grads, strict=True) if g is not None]
        if present:
            torch._foreach_copy_(views, present)
            self.gradients.to_host(self._span(Kind.PARAMETER))
        return absent

    @torch.no_grad()
    def first_nonfinite(self, absent: tuple[int, ...]) -> str | None:
        """Name of the first present variable whose gradient, as collected last, holds NaN or infinity; else None.

        One reduction per arena, in float32 or wider. Only when that is not finite is each variable looked at, for the
        sum of large finite values may overflow, and absent variables may hold anything.
        """
        views = [
            self.gradients.view(begin, key.dtype, ((end - begin) // key.dtype.itemsize,))
            for key, (begin, end) in self.plan.arenas
            if key.kind is Kind.PARAMETER
        ]
        wide = [torch.float64 if view.dtype is torch.float64 else torch.float32 for view in views]
        sums = torch.stack([view.sum(dtype=dtype).float() for view, dtype in zip(views, wide, strict=True)])
        if bool(sums.isfinite().all()):
            return None
        missing = frozenset(absent)
        for number, view in enumerate(self._gradient_views):
            if number not in missing and not bool(view.isfinite().all()):
                return self.plan.variables[number].name
        return None

    def collect_buffers(self) -> None:
        """Copy the module's buffers to where a push takes them from."""
        self._gather_buffers(self.gradients, self._pushed_buffer_views)

    def collect_values(self) -> None:
        """Make host memory hold all parameters and buffers as the module has them now, to upload them."""
        self._gather_buffers(self.parameters, self._buffer_views)
        self.parameters.to_host(self._span(Kind.PARAMETER))

    @torch.no_grad()
    def _gather_buffers(self, memory: FlatMemory, views: list[torch.Tensor]) -> None:
        if views:
            torch._foreach_copy_(views, [reference.value for reference in self._bindings.buffers])
            memory.to_host(self._span(Kind.BUFFER))

    def publish_parameters(self) -> None:
        """Make received parameters the module's, and let autograd know that they changed in place."""
        self.parameters.to_device(self._span(Kind.PARAMETER))
        torch.autograd.graph.increment_version(self._bindings.parameters)

    @torch.no_grad()
    def publish_buffers(self) -> None:
        """Copy received buffers into the module."""
        if self._buffer_views:
            self.parameters.to_device(self._span(Kind.BUFFER))
            torch._foreach_copy_([reference.value for reference in self._bindings.buffers], self._buffer_views)

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

    def _refuse_sparse(self) -> None:
        for number, parameter in enumerate(self._bindings.parameters):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InvalidRequest(
                    "a gradient is sparse, and variables are dense",
                    variable=self.plan.variables[number].name,
                    remedy="make the layer with sparse=False",
                )
