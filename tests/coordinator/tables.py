"""Tables for tests of the coordinator, which never sees a row."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_protocol.model.tables import RowInit, TableSpec


def table(name: str = "emb", buckets: int = 16, optimizer: str = "adagrad", **settings: Any) -> TableSpec:
    given: dict[str, Any] = {
        "dim": 8,
        "seed": 7,
        "init": RowInit("uniform", -0.1, 0.1),
        "options": ROW_OPTIMIZERS[optimizer].defaults() if optimizer in ROW_OPTIMIZERS else {},
    }
    return TableSpec(name=name, buckets=buckets, optimizer=optimizer, **given | settings)


def model(*tables: TableSpec, name: str = "net", rows: int = 0) -> ModelSpec:
    """A model of these tables, and of one variable where ``rows`` are given."""
    variables = (Variable("w", (rows,), DType.FLOAT32),) if rows else ()
    return ModelSpec(name, "torch.optim.SGD", variables, ({"lr": 0.1},), tables=tables)


#: Several tables of one model, by their numbers of buckets.
bucket_counts = st.lists(st.sampled_from([1, 2, 4, 8, 32, 64]), min_size=1, max_size=6)
shard_numbers = st.sets(st.integers(0, 6), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))


def tables_of(counts: list[int]) -> tuple[TableSpec, ...]:
    return tuple(table(f"t{number}", buckets) for number, buckets in enumerate(counts))
