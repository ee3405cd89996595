"""Which rows there are, how large, and how often each is measured."""

from __future__ import annotations

from benchmarks import floor, memory, ours, overlap, tls
from benchmarks.peers import gloo, raw_socket, tls_socket, torch_rpc
from benchmarks.rows import GB, KB, MB, Group, Key, Subject, size
from benchmarks.tables import growth, rates, saved, training

SMALL = 10 * KB
LARGE = 100 * MB
#: A size of its own, so that each row belongs to one group.
MANY_SHARDS_SIZE = 20 * MB
THOUSAND_SIZES = (4 * MB, LARGE)
SHARDS = (1, 2, 4)
THOUSAND = 1000
TABLE_ROWS = 10**6
INSERTED_ROWS = 10**7


def groups(quick: bool) -> list[Group]:
    """All groups; a small look has two sizes and few repetitions."""
    if quick:
        return [
            Group(f"{size(SMALL)}, every way", _every_way(SMALL), rounds=3, count=100, warm_up=10),
            Group(f"{size(10 * MB)}, every way", _every_way(10 * MB), rounds=3, count=3),
            *_tables(TABLE_ROWS // 10, INSERTED_ROWS // 10, rounds=3, count=5),
        ]
    small = (*_every_way(SMALL), gloo.subject(SMALL), *_tensors(SMALL, 10))
    middle = (*_every_way(MB), gloo.subject(MB))
    large = (*_every_way(LARGE), gloo.subject(LARGE), *_tensors(LARGE, THOUSAND))
    huge = (*_every_way(GB), gloo.subject(GB))
    thousand = (*_tensors(4 * MB, 1), *_tensors(4 * MB, THOUSAND))
    found = [
        Group(f"{size(SMALL)}, every way", small, rounds=10, count=200, warm_up=20),
        Group(f"{size(MB)}, every way", middle, rounds=8, count=30, warm_up=3),
        Group(f"{size(10 * MB)}, every way", _every_way(10 * MB), rounds=8, count=10, warm_up=2),
        Group(f"{size(LARGE)}, every way", large, rounds=6, count=3),
        Group(f"{size(GB)}, every way", huge, rounds=2, count=2, together=False),
        Group(f"{THOUSAND:,} tensors, {size(4 * MB)}", thousand, rounds=8, count=15, warm_up=2),
    ]
    found += [_many_shards(transport) for transport in ours.transports()]
    if overlap.exists():
        hidden = tuple(overlap.subject(transport, LARGE) for transport in ours.transports())
        found.append(Group("overlap", hidden, rounds=8, count=5))
    held = tuple(memory.subject(transport, LARGE, n) for transport in ours.transports() for n in (1, 2))
    found.append(Group("memory of a shard", held, rounds=3, count=10, together=False))
    found += [
        Group(f"{size(SMALL)}, tls", _tls(SMALL), rounds=10, count=100, warm_up=20),
        Group(f"{size(MB)}, tls", _tls(MB), rounds=8, count=20, warm_up=3),
        Group(f"{size(LARGE)}, tls", _tls(LARGE), rounds=6, count=3),
    ]
    return found + _tables(TABLE_ROWS, INSERTED_ROWS, rounds=8, count=20)


def _tables(held: int, inserted: int, *, rounds: int, count: int) -> list[Group]:
    rated = tuple(rates.subject(transport, held) for transport in ours.transports())
    trained = [training.local_subject(optimizer) for optimizer in training.OPTIMIZERS]
    trained += [
        training.subject(transport, optimizer) for optimizer in training.OPTIMIZERS for transport in ours.transports()
    ]
    grown = (
        growth.memory_subject(inserted),
        *(growth.subject(each, inserted) for each in ours.transports()),
        growth.subject(ours.BULK, inserted, growth.MANY_AT_ONCE),
    )
    return [
        Group("rows of a table", rated, rounds, count, warm_up=3),
        Group("a training step with tables", tuple(trained), rounds, count // 2, warm_up=2),
        Group("new rows of a table", grown, rounds=3, count=1, warm_up=0, together=False),
        Group("checkpoints of a table", (saved.subject(held),), rounds=3, count=1, together=False),
    ]


def _every_way(nbytes: int) -> tuple[Subject, ...]:
    key = Key("", "", nbytes)
    mine = [
        ours.subject(transport, key, ours.STEP, ours.PULL, ours.COPYING, ours.FRESH) for transport in ours.transports()
    ]
    peers = [torch_rpc.subject(system, nbytes) for system in (torch_rpc.TCP, torch_rpc.SHM)]
    return (raw_socket.subject(nbytes), floor.subject(nbytes), *peers, *mine)


def _tls(nbytes: int) -> tuple[Subject, ...]:
    pairs = [(transport, how) for transport in ours.transports() for how in (tls.WITHOUT, tls.WITH)]
    mine = [tls.subject(transport, how, nbytes) for transport, how in [*pairs, (ours.BULK, tls.TOKEN_ONLY)]]
    return (tls_socket.subject(nbytes), *mine)


def _tensors(nbytes: int, tensors: int) -> tuple[Subject, ...]:
    key = Key("", "", nbytes, tensors)
    mine = [ours.subject(transport, key, ours.STEP) for transport in ours.transports()]
    return (*mine, torch_rpc.subject(torch_rpc.TCP, nbytes, tensors, operations=(torch_rpc.STEP,)))


def _many_shards(transport: str) -> Group:
    subjects = tuple(
        ours.subject(transport, Key("", "", MANY_SHARDS_SIZE, shards=shards), ours.STEP) for shards in SHARDS
    )
    return Group(f"shards, {transport}", subjects, rounds=5, count=10, warm_up=2)
