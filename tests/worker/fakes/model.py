"""What a fake shard holds of its model: one tensor per slice, trained by the torch class itself, and rows of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ps_protocol.model.layout import Layout, aligned
from ps_protocol.model.spec import ALIGNMENT_BYTES, Kind, ShardMap, Slice
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.options import options_from_pb
from tests.worker.fakes.payloads import join, take
from tests.worker.fakes.tables import FakeTables


class FakeModel:
    """Applies every push at once."""

    def __init__(self, shard_map: ShardMap, shard: int) -> None:
        self.layout = Layout.of(shard_map, shard)
        self._learning_rates: dict[int, float] = {}
        self.forget()

    def forget(self) -> None:
        """As a shard without durability comes back."""
        self.initialised = False
        #: What it says of workers' positions, and how often values were replaced.
        self.clocks: dict[int, tuple[int, int]] = {}
        self.assigned = 0
        self.assigned_checksums: dict[int, int] = {}
        self.version = 0
        self.last_sequence: dict[tuple[int, int], int] = {}
        self.tables = FakeTables(self.layout, self._learning_rates)
        self.tensors = [
            torch.zeros(span.shape, dtype=getattr(torch, span.variable.dtype.value)) for span in self.layout.slices
        ]
        self._kinds = [span.variable.kind for span in self.layout.slices]
        self._parameters = [t for t, kind in zip(self.tensors, self._kinds, strict=True) if kind is Kind.PARAMETER]
        self._optimizer = self._new_optimizer() if self._parameters else None

    def _new_optimizer(self) -> torch.optim.Optimizer:
        spec = self.layout.shard_map.spec
        numbers = [span.variable.group for span in self.layout.slices if span.variable.kind is Kind.PARAMETER]
        groups: list[dict[str, Any]] = []
        for number, options in enumerate(spec.group_options):
            own = [p for p, group in zip(self._parameters, numbers, strict=True) if group == number]
            groups += [{"params": own, **_with_tuples(options)}] if own else []
        torch_class = getattr(torch.optim, spec.optimizer.rsplit(".", 1)[1])
        optimizer: torch.optim.Optimizer = torch_class(groups)
        return optimizer

    def lay_out(
        self, shard_map: ShardMap, values: Mapping[Slice, torch.Tensor], rows: Sequence[Mapping[int, np.ndarray]] = ()
    ) -> None:
        """Hold other slices and rows from now on; what is known of pushes stays."""
        self.layout = Layout.of(shard_map, self.layout.shard)
        known = self.version, self.last_sequence
        self.forget()
        self.initialised = True
        self.version, self.last_sequence = known
        for tensor, span in zip(self.tensors, self.layout.slices, strict=True):
            tensor.copy_(values[replace(span.slice, shard=0)])
        self.tables.fill(rows)

    def pushed(self, header: pb.PushHeader) -> list[torch.Tensor]:
        """The tensors that a push has values for, in the order of its payload."""
        if header.skipped:
            return []
        absent = set(header.absent)
        found = enumerate(zip(self.tensors, self._kinds, strict=True))
        return [t for i, (t, kind) in found if i not in absent and (kind is Kind.PARAMETER or header.with_buffers)]

    def payload_bytes(self, header: pb.PushHeader) -> int:
        return sum(aligned(t.nbytes) for t in self.pushed(header)) + self.tables.payload_bytes(header)

    def apply(self, header: pb.PushHeader, wanted: Sequence[torch.Tensor], payload: bytes) -> None:
        for tensor in wanted:
            value = torch.empty_like(tensor)
            payload = take(value, payload, ALIGNMENT_BYTES)
            if any(tensor is p for p in self._parameters):
                tensor.grad = value
            else:
                tensor.copy_(value)
        if self._optimizer is not None:
            present = {s.variable.group for s in self.layout.slices if s.variable.kind is Kind.PARAMETER}
            for group, number in zip(self._optimizer.param_groups, sorted(present), strict=True):
                if header.groups:
                    declared = self.layout.shard_map.spec.group_options[number]
                    group.update(_with_tuples({**declared, **options_from_pb(header.groups[number])}))
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.tables.apply(header, payload)
        self.version += 1

    def values(self, *, with_buffers: bool) -> bytes:
        kinds = zip(self.tensors, self._kinds, strict=True)
        return join([t for t, kind in kinds if with_buffers or kind is Kind.PARAMETER], ALIGNMENT_BYTES)

    def load(self, header: pb.LoadHeader, payload: bytes) -> None:
        if header.slices:
            self.assigned += 1
            self.assigned_checksums.update(zip(header.slices, header.checksums, strict=False))
            for index in header.slices:
                payload = take(self.tensors[index], payload)
        elif header.with_region:
            for tensor in self.tensors:
                payload = take(tensor, payload, ALIGNMENT_BYTES)
            self.initialised = True
        if header.with_state and self._optimizer is not None:
            self._optimizer.state.clear()
            for state in header.state:
                dtype = getattr(torch, convert_model.dtype_from_pb(state.dtype).value)
                value = torch.zeros(tuple(state.shape), dtype=dtype)
                payload = take(value, payload)
                self._optimizer.state[self.tensors[state.slice]][state.name] = value
        assert payload == b""

    def save(self) -> tuple[pb.SaveHeader, bytes]:
        """Values and the optimizer's state: what is in the payload, and the payload."""
        entries = [
            (i, name, value)
            for i, t in enumerate(self._parameters)
            for name, value in (self._optimizer.state.get(t, {}) if self._optimizer else {}).items()
            if value is not None
        ]
        payload = join(self.tensors, ALIGNMENT_BYTES) + join([value for _, _, value in entries])
        described = [
            pb.StateTensor(slice=i, name=name, dtype=f"DTYPE_{str(v.dtype)[6:].upper()}", shape=v.shape)
            for i, name, v in entries
        ]
        return pb.SaveHeader(version=self.version, state=described, payload_bytes=len(payload)), payload

    def status(self) -> pb.ModelStatus:
        clocks = [pb.WorkerClock(rank=r, phase=phase, clock=clock) for r, (phase, clock) in self.clocks.items()]
        return pb.ModelStatus(
            version=self.version,
            initialised=self.initialised,
            clocks=clocks,
            assigned=self.assigned,
            assigned_checksums=self.assigned_checksums,
        )


def _with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """As torch wants them; lists are what they become on the wire."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
