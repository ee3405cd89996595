"""Parameters that arrive in the other of two memories: large ones change memory, and no other tensor sees a difference.

Costs about 2 s.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ps_protocol.cluster.answers import StepAnswer
from ps_worker.memory import double_buffer
from ps_worker.memory.double_buffer import BackRegion
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from tests.worker.fakes import place


@pytest.fixture(autouse=True)
def _all_but_the_smallest_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double_buffer, "LARGE_BYTES", 64)


class Receiver:
    """A model of ``shapes`` over two shards; parts that arrive are filled with one number."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], shards: int = 2, *, buffers: bool = False) -> None:
        self.module = nn.Module()
        for number, shape in enumerate(shapes):
            self.module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))
        if buffers:
            self.module.register_buffer("mean", torch.zeros(5))
        declaration = build_spec(torch.optim.SGD, self.module, {"lr": 0.1}, name="model")
        self.flat = FlatModel(declaration.bindings, place(declaration.spec, shards), doubled=True)
        assert self.flat.double is not None
        self.regions = [BackRegion(self.flat.double, shard) for shard in range(shards)]
        self.parameters = list(declaration.bindings.parameters)

    def receive(
        self, shard: int, value: float, absent: tuple[int, ...] = (), *, buffers: bool = False, fails: bool = False
    ) -> None:
        """``fails``: half of the payload comes, and then the stream breaks."""
        layout = self.flat.plan.layouts[shard]
        size = sum(end - begin for begin, end in layout.ranges(absent, buffers=buffers))
        result = StepAnswer(absent=absent, with_buffers=buffers, payload_bytes=size)
        pieces = self.regions[shard].place(result) if size else []
        assert sum(map(len, pieces)) == size
        for piece in pieces:
            target = torch.frombuffer(piece, dtype=torch.float32)
            target[: len(target) // 2 if fails else len(target)].fill_(value)
        if not fails:
            self.regions[shard].complete(result)

    def receive_all(self, value: float) -> None:
        for shard in range(len(self.regions)):
            self.receive(shard, value)
        self.flat.publish_parameters()

    def seen(self) -> set[float]:
        return {value for p in self.parameters for value in p.detach().view(-1).tolist()}


SHAPES = [(40, 3), (2,), (64,), (7, 9), (100,)]


def test_large_parameters_change_memory_and_small_ones_are_copied() -> None:
    job = Receiver(SHAPES)
    versions = [p._version for p in job.parameters]
    before = [p.data_ptr() for p in job.parameters]
    places = []
    for step in range(1, 5):
        job.receive_all(float(step))
        assert job.seen() == {float(step)}
        assert job.flat.written() == ()
        places.append([p.data_ptr() for p in job.parameters])
    assert [a == b for a, b in zip(places[0], before, strict=True)] == [False, True, False, False, False]
    assert places[1] == before
    assert places[2] == places[0]
    assert [p._version - version for p, version in zip(job.parameters, versions, strict=True)] == [4] * 5


@pytest.mark.parametrize("alias", ["detach", "data", "state_dict", "numpy", "storage", "row"])
def test_what_else_uses_the_memory_of_a_parameter_goes_on_seeing_its_values(alias: str) -> None:
    job = Receiver([(64, 2)], shards=1)
    job.receive_all(1.0)
    (parameter,) = job.parameters
    address = parameter.data_ptr()
    other = {
        "detach": lambda: parameter.detach(),
        "data": lambda: parameter.data,
        "state_dict": lambda: job.module.state_dict()["p0"],
        "numpy": lambda: parameter.detach().numpy(),
        "storage": lambda: parameter.untyped_storage(),
        "row": lambda: parameter.detach()[3],
    }[alias]()
    for value in (2.0, 3.0):
        job.receive_all(value)
        assert parameter.data_ptr() == address
        if alias != "storage":
            assert set(torch.as_tensor(other).reshape(-1).tolist()) == {value}
    del other
    job.receive_all(4.0)
    assert parameter.data_ptr() != address
    assert job.seen() == {4.0}


def test_a_graph_made_with_the_values_before_is_refused_as_in_torch() -> None:
    job = Receiver([(64, 2)], shards=1)
    (parameter,) = job.parameters
    graphs = [parameter.square().sum(), (parameter.t() @ torch.ones(64)).square().sum()]
    loss = sum(graphs, torch.zeros(()))
    job.receive_all(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_variable_that_one_of_its_shards_has_not_sent_is_copied_in_part() -> None:
    job = Receiver([(1000, 4)])
    address = job.parameters[0].data_ptr()
    assert all(layout.slices for layout in job.flat.plan.layouts)
    job.receive(1, 5.0)
    job.flat.publish_parameters()
    assert job.parameters[0].data_ptr() == address
    assert job.seen() == {0.0, 5.0}
    job.receive_all(6.0)
    assert job.parameters[0].data_ptr() != address
    assert job.seen() == {6.0}


def test_what_is_overwritten_by_a_payload_that_fails_never_reaches_the_model() -> None:
    job = Receiver([(40,), (50,), (3,)], shards=1)
    job.receive_all(1.0)
    job.receive(0, 2.0)
    job.receive(0, 3.0, fails=True)
    job.flat.publish_parameters()
    assert job.seen() == {1.0}
    job.receive_all(4.0)
    assert job.seen() == {4.0}


def test_a_parameter_with_memory_of_its_own_keeps_it() -> None:
    job = Receiver([(64,), (80,)], shards=1)
    job.receive_all(1.0)
    own = torch.full((64,), 9.0)
    job.parameters[0].data = own
    assert job.flat.written() == (0,)
    for value in (2.0, 3.0):
        job.receive_all(value)
        assert set(own.tolist()) == {value}
        assert job.parameters[0].data_ptr() == own.data_ptr()
        assert job.flat.written() == ()


def test_memory_that_was_given_a_moment_ago_is_kept_too() -> None:
    job = Receiver([(64,)], shards=1)
    job.receive(0, 1.0)
    own = torch.full((64,), 9.0)
    job.parameters[0].data = own
    job.flat.publish_parameters()
    assert job.parameters[0].data_ptr() == own.data_ptr()
    assert job.seen() == {9.0}
    job.flat.check_in_place()
    job.receive_all(2.0)
    assert set(own.tolist()) == {2.0}


def test_buffers_arrive_in_the_module() -> None:
    job = Receiver([(64,)], shards=1, buffers=True)
    job.receive(0, 7.0, buffers=True)
    job.flat.publish_parameters()
    job.flat.publish_buffers()
    assert set(job.module.mean.tolist()) == {7.0}


def test_writes_past_torch_are_found_in_either_memory() -> None:
    job = Receiver([(64,)], shards=1)
    for value in (1.0, 2.0):
        job.receive_all(value)
        job.parameters[0].data.add_(0.5)
        assert job.flat.written() == (0,)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_arrivals_leaves_each_slice_with_what_came_last(seed: int) -> None:
    chosen = random.Random(seed)
    print(f"seed {seed}")
    job = Receiver(
        [(chosen.choice([1, 5, 30, 90]), chosen.choice([1, 3, 16])) for _ in range(9)], chosen.choice([1, 3])
    )
    layouts = job.flat.plan.layouts
    current = {(shard, i): 0.0 for shard, layout in enumerate(layouts) for i in range(len(layout.slices))}
    arrived: dict[tuple[int, int], float] = {}
    held: list[torch.Tensor] = []
    for value in range(1, 60):
        shard = chosen.randrange(len(layouts))
        count = len(layouts[shard].slices)
        absent = tuple(i for i in range(count) if chosen.random() < chosen.choice([0.0, 0.0, 0.3, 1.0]))
        fails = chosen.random() < 0.1
        job.receive(shard, float(value), absent, fails=fails)
        for index in set(range(count)) - set(absent):
            arrived.pop((shard, index), None)
            if not fails:
                arrived[shard, index] = float(value)
        if chosen.random() < 0.5:
            job.flat.publish_parameters()
            current |= arrived
            arrived = {}
        held = [p.detach() for p in job.parameters if chosen.random() < 0.2] if chosen.random() < 0.3 else held
        for (of, index), expected in current.items():
            span = layouts[of].slices[index].slice
            rows = job.parameters[span.variable].detach()[span.row_begin : span.row_end]
            assert set(rows.reshape(-1).tolist()) <= {expected}
            # What would be uploaded is what the model has.
            (*pieces,) = job.flat.pieces(job.flat.plan.values(of, [index]))
            assert b"".join(pieces) == rows.numpy().tobytes()
