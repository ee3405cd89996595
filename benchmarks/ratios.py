"""The ratios that are asked for, computed from rows of one run. Pure: rows in, ratios out."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import catalog, floor, memory, ours, overlap, tls
from benchmarks.peers import raw_socket, tls_socket, torch_rpc
from benchmarks.rows import GB, MB, Key, Rows, size
from benchmarks.tables import growth, rates, saved, training
from benchmarks.timing import Figures


@dataclass(frozen=True)
class Term:
    """One measure of one row."""

    key: Key
    measure: str = "seconds"


@dataclass(frozen=True)
class Target:
    """``top`` over ``bottom``, each a sum of terms, and the bound that is asked for; None: shown only."""

    title: str
    top: tuple[Term, ...]
    bottom: tuple[Term, ...]
    bound: float | None = None
    at_least: bool = True


@dataclass(frozen=True)
class Ratio:
    """A ratio as measured: the median of its rounds, and the smallest and largest of them."""

    title: str
    value: float
    low: float
    high: float
    #: As "≥ 1.4"; empty where nothing is asked.
    target: str
    #: None where nothing is asked.
    reached: bool | None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the results."""
        return dict(vars(self))


def ratios(rows: Rows) -> list[Ratio]:
    """Every ratio whose rows were measured, in the order of the table."""
    sizes = sorted({key.nbytes for key in rows} - {0})
    found = []
    for target in (*targets(sizes), *of_tables(sorted({key.rows for key in rows}))):
        if all(term.measure in rows.get(term.key, {}) for term in target.top + target.bottom):
            found.append(_ratio(target, rows))
    return found


def _ratio(target: Target, rows: Rows) -> Ratio:
    top = [rows[term.key][term.measure] for term in target.top]
    bottom = [rows[term.key][term.measure] for term in target.bottom]
    values = [above / below for above, below in zip(_sums(top), _sums(bottom), strict=False)]
    value = statistics.median(values)
    if target.bound is None:
        return Ratio(target.title, value, min(values), max(values), "", None)
    sign = "≥" if target.at_least else "≤"
    reached = value >= target.bound if target.at_least else value <= target.bound
    return Ratio(target.title, value, min(values), max(values), f"{sign} {target.bound:g}", reached)


def _sums(terms: list[Figures]) -> list[float]:
    """Per round: rounds of one group lie side by side in time, so that what disturbs one disturbs the other."""
    return [sum(values) for values in zip(*(figures.rounds for figures in terms), strict=False)]


def targets(sizes: list[int]) -> Iterator[Target]:
    """What is asked for, at the sizes it is asked for, and the same shown at other ``sizes``."""
    for nbytes in sizes:
        yield from _against_tcp(nbytes)
        yield from _against_shared_memory(nbytes)
        yield from _costs(nbytes)
        yield from _under_tls(nbytes)


def _against_tcp(nbytes: int) -> Iterator[Target]:
    at, large, small = size(nbytes), nbytes == catalog.LARGE, nbytes <= catalog.SMALL
    asked = nbytes in (MB, catalog.LARGE, GB)
    needed = {catalog.SMALL: 6.0, MB: 1.4, 4 * MB: 1.6, 10 * MB: 1.6, catalog.LARGE: 2.2, GB: 1.4}.get(nbytes)
    bulk, grpc = (Key(ours.system(transport), ours.STEP, nbytes) for transport in (ours.BULK, ours.GRPC))
    bulk_pull = Key(ours.system(ours.BULK), ours.PULL, nbytes)
    raw_pull = Key(raw_socket.SYSTEM, raw_socket.PULL, nbytes)
    raw = Key(raw_socket.SYSTEM, raw_socket.BOTH, nbytes)
    raw_step = Key(raw_socket.SYSTEM, raw_socket.STEP, nbytes)
    rpc = Key(torch_rpc.TCP, torch_rpc.STEP, nbytes)
    one_call = Key(torch_rpc.TCP, torch_rpc.ONE_CALL, nbytes)
    if not small:
        yield _faster(f"pull with bulk: rate against a raw socket, {at}", raw_pull, bulk_pull, 0.85 if large else None)
        yield _faster(f"step with bulk: rate against a raw socket, {at}", raw, bulk, 0.95 if large else None)
        yield _faster(f"step with bulk: against a raw socket with SGD in between, {at}", raw_step, bulk)
        yield _faster(f"step with grpc: rate against a raw socket, {at}", raw, grpc, 0.6 if large else None)
    yield _faster(f"step with bulk: times faster than torch RPC over TCP, {at}", rpc, bulk, needed)
    yield _faster(f"step with bulk: times faster than torch RPC over TCP in one call, {at}", one_call, bulk)
    yield _faster(
        f"step with grpc: times faster than torch RPC over TCP, {at}",
        rpc,
        grpc,
        2.5 if small else 1.1 if asked else None,
    )
    if nbytes <= MB:
        fresh = Key(torch_rpc.TCP, torch_rpc.FRESH, nbytes)
        for transport, wanted in ((ours.BULK, 3.0), (ours.GRPC, 1.3)):
            title = f"step with {transport}, fresh gradients: times faster than torch RPC over TCP, {at}"
            yield _faster(title, fresh, Key(ours.system(transport), ours.FRESH, nbytes), None if small else wanted)


def _against_shared_memory(nbytes: int) -> Iterator[Target]:
    at, large = size(nbytes), nbytes == catalog.LARGE
    shm = Key(ours.system(ours.SHM), ours.STEP, nbytes)
    rpc = Key(torch_rpc.SHM, torch_rpc.STEP, nbytes)
    title = f"step with shm: times faster than torch RPC over shared memory, {at}"
    yield _faster(title, rpc, shm, 4.0 if large else None)
    if nbytes <= catalog.SMALL:
        return
    least = (Term(Key(floor.SYSTEM, floor.APPLY, nbytes)), Term(Key(floor.SYSTEM, floor.COPY, nbytes)))
    bound = 1.15 if large else None
    yield Target(f"step with shm: against fused SGD and one memory copy, {at}", (Term(shm),), least, bound, False)


def _costs(nbytes: int) -> Iterator[Target]:
    at, large = size(nbytes), nbytes == catalog.LARGE
    for transport in ours.TRANSPORTS:
        system = ours.system(transport)
        step = Key(system, ours.STEP, nbytes)
        many = Key(system, ours.STEP, nbytes, catalog.THOUSAND)
        bound = 1.1 if nbytes in catalog.THOUSAND_SIZES else None
        yield _cost(f"step with {transport}: 1,000 tensors against 1, {at}", Term(many), Term(step), bound)
        for operation, how in ((overlap.OPERATION, ""), (overlap.COPYING, ", gradients copied")):
            hidden = Key(system, operation, nbytes)
            title = f"overlapped step with {transport}{how}: against computing alone, {at}"
            yield _cost(title, Term(hidden), Term(hidden, "compute_seconds"), 1.1)
        for pushers in (1, 2):
            held = Key(system, memory.OPERATION, nbytes, workers=pushers)
            peak, allowed = Term(held, "peak_bytes"), Term(held, "bound_bytes")
            title = f"shard's memory with {transport}: against its bound, {pushers} pushing, {at}"
            yield _cost(title, peak, allowed, 1.0 if large else None)


def _under_tls(nbytes: int) -> Iterator[Target]:
    at, large, small = size(nbytes), nbytes == catalog.LARGE, nbytes <= catalog.SMALL
    for transport in ours.TRANSPORTS:
        without, under = (tls.key(transport, how, nbytes) for how in (tls.WITHOUT, tls.WITH))
        if small:
            yield _cost(f"step with {transport}: under TLS against in clear, {at}", Term(under), Term(without), 1.3)
        else:
            bound = 0.55 if large and transport == ours.GRPC else None
            yield _faster(f"step with {transport}: rate under TLS against in clear, {at}", without, under, bound)
    bulk, clear = (tls.key(ours.BULK, how, nbytes) for how in (tls.WITH, tls.TOKEN_ONLY))
    bare, plain = Key(tls_socket.SYSTEM, raw_socket.BOTH, nbytes), tls.key(ours.BULK, tls.WITHOUT, nbytes)
    yield _faster(
        f"step with bulk under TLS: rate against a Python ssl socket, {at}", bare, bulk, 0.85 if large else None
    )
    yield _faster(f"step with bulk, token-only: rate against in clear, {at}", plain, clear, 0.97 if large else None)


def of_tables(counts: list[int]) -> Iterator[Target]:
    """What is asked for of sparse tables, at the ``counts`` of rows it is asked for, and the same shown at others."""
    for rows in counts:
        for transport in ours.TRANSPORTS:
            yield from _rates(transport, rows)
            yield from _growth(transport, rows)
        key, asked = saved.key(rows), rows == catalog.TABLE_ROWS
        title = f"bytes of a checkpoint after 1 % of {rows:,} rows changed: against a full one"
        yield _cost(title, Term(key, "increment_bytes"), Term(key, "full_bytes"), 0.03 if asked else None)
    for transport, optimizer in itertools.product(ours.TRANSPORTS, training.OPTIMIZERS):
        local = Term(training.local_key(optimizer))
        for prefetched, bound in ((False, 2.0), (True, 1.3)):
            key = training.key(transport, optimizer, prefetched=prefetched)
            asked = transport != ours.GRPC
            title = f"{key.operation}, with {transport}: against one process of plain torch"
            yield _cost(title, Term(key), local, bound if asked else None)


def _rates(transport: str, rows: int) -> Iterator[Target]:
    for operation in rates.OPERATIONS:
        key, asked = rates.key(transport, operation, rows), rows == catalog.TABLE_ROWS and transport != ours.GRPC
        needed = 3.0 if operation == rates.PULL else 1.5
        title = f"{operation}, with {transport}: millions a second, {rows:,} rows"
        yield Target(title, (Term(key, "million_rows"),), (Term(key),), needed if asked else None)
        if transport == ours.SHM:
            bulk = rates.key(ours.BULK, operation, rows)
            yield _faster(
                f"{operation}: times faster with shm than with bulk, {rows:,} rows", bulk, key, 1.5 if asked else None
            )


def _growth(transport: str, rows: int) -> Iterator[Target]:
    key, asked = growth.key(transport, rows), rows == catalog.INSERTED_ROWS and transport != ours.GRPC
    title = f"rows inserted, with {transport}: millions a second, {rows:,} rows"
    yield Target(title, (Term(key, "million_rows"),), (Term(key),), 3.0 if asked else None)
    least = Term(growth.memory_key(rows))
    yield _cost(f"rows inserted, with {transport}: against new memory for {rows:,} rows", Term(key), least, None)
    wait, allowed = Term(key, "longest_wait_seconds"), Term(key, "asked_wait_seconds")
    title = f"longest wait of another worker meanwhile, with {transport}: against 50 ms, {rows:,} rows"
    yield _cost(title, wait, allowed, 1.0 if asked else None)
    if transport == ours.BULK:
        many = growth.key(transport, rows, growth.MANY_AT_ONCE)
        wait, allowed = Term(many, "longest_wait_seconds"), Term(many, "asked_wait_seconds")
        title = f"the same with {growth.MANY_AT_ONCE:,} rows a push, with {transport}, {rows:,} rows"
        yield _cost(title, wait, allowed, 1.0 if asked else None)
    taken, bound = Term(key, "rows_bytes"), Term(key, "bound_bytes")
    title = f"memory of rows, with {transport}: against 95 bytes a row, {rows:,} rows"
    yield _cost(title, taken, bound, 1.0 if asked else None)


def _faster(title: str, theirs: Key, mine: Key, bound: float | None = None) -> Target:
    return Target(title, (Term(theirs),), (Term(mine),), bound, at_least=True)


def _cost(title: str, top: Term, bottom: Term, bound: float | None) -> Target:
    return Target(title, (top,), (bottom,), bound, at_least=False)
