"""Which shard holds which slice and which bucket of rows, without a coordinator."""

from __future__ import annotations

from ps_protocol.model.spec import ModelSpec, ShardMap, Slice


def place(spec: ModelSpec, shards: int, split_rows: int = 8) -> ShardMap:
    """Whole variables in turn; one with ``split_rows`` rows or more goes to all shards, after the whole ones."""
    whole, split = [], []
    for number, variable in enumerate(spec.variables):
        if variable.rows >= split_rows and shards > 1 and not spec.unsplit:
            borders = [variable.rows * i // shards for i in range(shards + 1)]
            split += [Slice(number, borders[i], borders[i + 1], i) for i in range(shards)]
        else:
            whole.append(Slice(number, 0, variable.rows, number % shards))
    tables = tuple(tuple(bucket % shards for bucket in range(table.buckets)) for table in spec.tables)
    return ShardMap(1, spec, shards, (*whole, *split), tables=tables)
