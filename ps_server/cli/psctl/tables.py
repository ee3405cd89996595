"""The command psctl tables --plan: what a table will take on each shard, told by the formulas of what takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal, InvalidOperation

import click

from ps_protocol.errors import ConfigError, PsError
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import (
    DEFAULT_BUCKETS,
    MAX_BUCKETS,
    Eviction,
    RowInit,
    RowLife,
    TableSpec,
    size_in_bytes,
    validate,
)
from ps_server.cli.options.common import fail
from ps_server.cli.options.storage import LOG_BYTES
from ps_server.cli.psctl.output import output_option, print_result

_HELP = f"""Say what memory and disk a table will take, before there is one. No running job is needed.

\b
    psctl tables --plan rows=1e9 dim=64 optimizer=adagrad shards=16 memory=512GB

\b
rows       number of rows
dim        numbers of a row
optimizer  {", ".join(ROW_OPTIMIZERS)}
shards     number of shards (default: 1)
memory     as of the table's memory=: of all shards together, such as 512GB;
           the other rows are on disk (default: all rows are in memory)
buckets    as of the table's buckets= (default: {DEFAULT_BUCKETS})
eviction   as of the table's eviction=; with lfu the uses of rows are
           counted (default: {Eviction.REFUSE.value})

Sizes are powers of 1,024, as in memory=. They are of rows alone: a shard's process, its other parameters and ids that
wait for admission take memory, too. docs/tables.md says what each size is.
"""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What the rows of one table take, on one shard or on all."""

    rows: int
    rows_in_memory: int
    #: What is in memory of all rows, wherever their values are: a limit below it is exceeded.
    index_bytes: int
    #: All that is in memory.
    memory_bytes: int
    #: As much again while a checkpoint is written.
    checkpoint_memory_bytes: int
    #: The file of rows on disk as they come; and at most, after rows have come and gone.
    rows_file_bytes: int
    most_rows_file_bytes: int
    #: A snapshot with all rows; and all that snapshots take, at most.
    snapshot_bytes: int
    most_snapshot_bytes: int
    #: A full checkpoint.
    checkpoint_bytes: int
    #: The log, of each million rows that are pushed; and at most, unless the log has another limit.
    log_bytes_per_million: int
    most_log_bytes: int


def plan(spec: TableSpec, rows: int, shards: int) -> tuple[TablePlan, TablePlan]:
    """The shard with the most rows, and all shards together; ids are spread evenly. ``spec`` is valid.

    Raises ConfigError where a shard cannot have so many rows.
    """
    if shards > spec.buckets:
        raise ConfigError(
            "more shards than buckets: some would have no rows",
            expected=f"shards: at most {spec.buckets}",
            actual=str(shards),
            remedy=f"raise buckets, a power of two up to {MAX_BUCKETS}",
        )
    fewest, fuller = divmod(spec.buckets, shards)
    if not fuller:
        each = _on_shard(spec, rows, fewest)
        return each, _sum(each, shards)
    full = _on_shard(spec, rows, fewest + 1)
    return full, _sum(full, fuller, _on_shard(spec, rows, fewest), shards - fuller)


def _on_shard(spec: TableSpec, all_rows: int, buckets: int) -> TablePlan:
    # Compiled code: not for other commands.
    from ps_server.checkpoint.table_columns import whole_file_bytes
    from ps_server.checkpoint.table_copy import copy_bytes
    from ps_server.log.messages import update_row_bytes
    from ps_server.shard.durability.snapshotter import most_snapshot_bytes
    from ps_server.tables.bucket_contents import row_bytes
    from ps_server.tables.paged_rows import lot_rows, slot_bytes
    from ps_server.tables.record_file import MOST_RECORDS, most_records, record_bytes
    from ps_server.tables.row_memory import rows_within
    from ps_server.tables.store import MAX_ROWS, index_row_bytes, maps_bytes

    rows = -(-all_rows * buckets // spec.buckets)
    paged, width = spec.life.memory_bytes > 0, spec.width
    index = rows * index_row_bytes(width, with_uses=spec.life.counts_uses, on_disk=paged) + maps_bytes(buckets, rows)
    in_memory, memory = rows, index
    if paged:
        limit = spec.life.memory_bytes * buckets // spec.buckets
        in_memory = min(rows, rows_within(limit - index, slot_bytes(width)))
        memory = index + in_memory * slot_bytes(width)
    on_disk = rows - in_memory
    lot = min(on_disk, lot_rows(in_memory))
    records = most_records(on_disk + lot, lot)
    if rows > MAX_ROWS or records > MOST_RECORDS:
        raise ConfigError(
            "a shard cannot have so many rows of one table",
            expected=f"at most {MAX_ROWS} rows, and {MOST_RECORDS} records on disk",
            actual=f"{rows} rows, and up to {records} records",
            remedy="plan with more shards",
        )
    snapshot = rows * row_bytes(width)
    return TablePlan(
        rows,
        in_memory,
        index,
        memory,
        copy_bytes(spec, rows, in_memory, paged=paged),
        on_disk * record_bytes(width),
        records * record_bytes(width),
        snapshot,
        most_snapshot_bytes(snapshot),
        whole_file_bytes(spec, rows, buckets),
        1_000_000 * update_row_bytes(spec.dim) * buckets // spec.buckets,
        LOG_BYTES,
    )


def _sum(one: TablePlan, count: int, other: TablePlan | None = None, others: int = 0) -> TablePlan:
    return TablePlan(
        *(
            getattr(one, field.name) * count + (getattr(other, field.name) * others if other else 0)
            for field in fields(one)
        )
    )


def _number(key: str, text: str, most: int) -> int:
    try:
        number = Decimal(text) if text.isascii() else Decimal("nan")
    except InvalidOperation:
        number = Decimal("nan")
    # A size first: the digits of 1e999999999 do not fit into memory.
    if not number.is_finite() or not 1 <= number <= most or number % 1:
        raise ConfigError(f"{key} cannot be this", expected=f"a whole number from 1 to {most}", actual=text)
    return int(number)


_KEYS = ("rows", "dim", "optimizer", "shards", "memory", "buckets", "eviction")


def _values(settings: Sequence[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _KEYS or not value:
            raise ConfigError(
                "not a property of a table", expected=" ".join(f"{each}=…" for each in _KEYS), actual=setting
            )
        if key in found:
            raise ConfigError(f"{key} is given twice", actual=f"{key}={found[key]} and {setting}")
        found[key] = value
    if missing := [f"{key}=…" for key in _KEYS[:3] if key not in found]:
        raise ConfigError("a plan needs more", expected=" ".join(missing), actual=" ".join(settings) or "nothing")
    return found


def table_of(settings: Sequence[str]) -> tuple[TableSpec, int, int]:
    """The table, its rows, and the number of shards that ``settings``, such as "rows=1e9", say.

    Raises ConfigError, InvalidRequest, UnsupportedOptimizer.
    """
    values = _values(settings)
    rows, shards = _number("rows", values["rows"], 1 << 62), _number("shards", values.get("shards", "1"), MAX_BUCKETS)
    memory, kind = 0, values["optimizer"]
    if "memory" in values and not (memory := size_in_bytes(values["memory"])):
        raise ConfigError("memory cannot be this", expected="such as 512MB or 4GB", actual=values["memory"])
    policies = [each.value for each in Eviction]
    if values.get("eviction", policies[0]) not in policies:
        raise ConfigError("eviction cannot be this", expected=", ".join(policies), actual=values["eviction"])
    eviction = Eviction(values.get("eviction", policies[0]))
    buckets = _number("buckets", values.get("buckets", str(DEFAULT_BUCKETS)), MAX_BUCKETS)
    options = ROW_OPTIMIZERS[kind].defaults() if kind in ROW_OPTIMIZERS else {}
    life = RowLife(max_rows=max(rows, buckets), eviction=eviction, memory_bytes=memory)
    dim = _number("dim", values["dim"], 1 << 62)
    spec = TableSpec("planned", dim, 0, RowInit("constant"), kind, options, life, buckets)
    validate(spec)
    return spec, rows, shards


@click.command(help=_HELP)
@click.option("--plan", "planned", is_flag=True, required=True, help="Of a table that is not there yet.")
@click.argument("settings", nargs=-1, metavar="KEY=VALUE...")
@output_option()
def tables(planned: bool, settings: tuple[str, ...], as_json: bool) -> None:
    """Say what a table will take."""
    try:
        spec, rows, shards = table_of(settings)
        shard, together = plan(spec, rows, shards)
    except PsError as error:
        fail(error, 2)
    facts = {"shards": shards, "shard": asdict(shard), "all": asdict(together)}
    print_result(facts, _text(spec, shards, shard, together), as_json)


def _text(spec: TableSpec, shards: int, shard: TablePlan, together: TablePlan) -> str:
    def sizes(name: str) -> tuple[str, str]:
        return _size(getattr(shard, name)), _size(getattr(together, name))

    lines: list[tuple[str, str, str]] = [
        ("", "a shard", f"all {shards}"),
        ("rows", f"{shard.rows:,}", f"{together.rows:,}"),
        ("memory", *sizes("memory_bytes")),
        ("more while a checkpoint is written", *sizes("checkpoint_memory_bytes")),
    ]
    if spec.life.memory_bytes:
        lines += [
            ("rows in memory", f"{shard.rows_in_memory:,}", f"{together.rows_in_memory:,}"),
            ("file of the rows on disk, at first", *sizes("rows_file_bytes")),
            ("file of the rows on disk, at most", *sizes("most_rows_file_bytes")),
        ]
    lines += [
        ("snapshot of all rows", *sizes("snapshot_bytes")),
        ("snapshots, at most", *sizes("most_snapshot_bytes")),
        ("log of a million rows pushed", *sizes("log_bytes_per_million")),
        ("log, at most (--log-mb)", *sizes("most_log_bytes")),
        ("full checkpoint", *sizes("checkpoint_bytes")),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    shown = [f"{name:<{widths[0]}}  {one:>{widths[1]}}  {every:>{widths[2]}}".rstrip() for name, one, every in lines]
    if spec.life.memory_bytes and together.index_bytes > spec.life.memory_bytes:
        shown.append(f"memory is too little: ids and maps alone take {_size(together.index_bytes)}")
    return "\n".join(shown)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            break
        size_bytes /= 1024
    return f"{size_bytes:,.{0 if size_bytes >= 100 or unit == 'B' else 1 if size_bytes >= 10 else 2}f} {unit}"
