"""Which shard holds how much."""

from __future__ import annotations

from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.coordinator.history.recorder import NAMED, placement_of


def spec(*rows: int) -> ModelSpec:
    variables = tuple(Variable(f"v{number}", (count, 2), DType.FLOAT32) for number, count in enumerate(rows))
    return ModelSpec("net", "torch.optim.SGD", variables, ({"lr": 0.1},))


def test_bytes_of_each_variable_by_shard_the_largest_first() -> None:
    slices = (Slice(0, 0, 4, 0), Slice(1, 0, 6, 0), Slice(1, 6, 10, 1))
    found = placement_of([ShardMap(1, spec(4, 10), 2, slices)])
    assert [(each.name, dict(each.amounts)) for each in found] == [("v1", {0: 48, 1: 32}), ("v0", {0: 32})]


def test_small_variables_are_one_entry() -> None:
    count = NAMED + 20
    slices = tuple(Slice(number, 0, number + 1, number % 2) for number in range(count))
    found = placement_of([ShardMap(1, spec(*range(1, count + 1)), 2, slices)])
    assert len(found) == NAMED
    assert found[-1].count == 21
    assert sum(sum(each.amounts.values()) for each in found) == sum(range(1, count + 1)) * 8
