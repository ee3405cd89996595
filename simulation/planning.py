"""Decides from a seed what one run is."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from simulation.plan import SEPARATE, SMALL_LOG_BYTES, Fault, Plan, Size, random_mode
from simulation.swarms import as_swarm, in_order, moving

MOST_PER_HOST = 4
"""Workers of a host, at most."""

_RULES = (*[None] * 8, "accept", "scale", "scale:0", "scale:2", "reject", "reject:1")


def make_plan(seed: int, size: Size) -> Plan:
    """The run that ``seed`` stands for; the same whenever ``size`` is the same."""
    plan, random = _ordinary(seed, size), Random(f"swarm of {seed}")
    if random.random() < size.swarms and size.workers <= 100:
        plan = as_swarm(plan, size.faults, random)
    plan = replace(plan, stale=Random(f"rules of {seed}").choice(_RULES))
    plan = _with_hosts(plan, size, Random(f"hosts of {seed}"))
    plan = _with_small_logs(plan, Random(f"logs of {seed}")) if "full_restart" in size.faults else plan
    plan = _with_readers(plan, size, Random(f"readers of {seed}"))
    return _with_relay(plan, size, Random(f"relay of {seed}"))


def _ordinary(seed: int, size: Size) -> Plan:
    """All kinds of faults, a few of each."""
    random, more = Random(f"plan of {seed}"), Random(f"more of {seed}")
    large = size.workers > 100
    expected = size.workers if random.random() < 0.7 else 0
    window = random.uniform(5, 15)
    phases = random.choice([1, 2, 3]) if not large else 1
    steps = -(-size.steps // phases)
    durable = random.random() < 0.8
    calls = "calls" in size.faults
    kinds = [kind for kind in size.faults if kind not in SEPARATE]
    count = (random.randrange(2, 14) if not large else random.randrange(10, 40)) if kinds else 0
    faults = in_order(Fault(random.uniform(0.5, window), random.choice(kinds)) for _ in range(count))
    plan = Plan(
        seed=seed,
        shards=size.shards,
        workers=size.workers,
        steps=steps,
        phases=phases,
        think_seconds=window / (steps * phases + 1) * random.uniform(0.3, 1.0),
        skipped=random.choice([0.0, 0.0, 0.05, 0.3]),
        consistency=random_mode(random, expected),
        expected_workers=expected,
        durable=durable,
        snapshot_seconds=random.choice([0.0 if durable else 0.7, 0.7, 3.0, 5.0]),
        fsync=durable and random.random() < 0.5,
        sync_seconds=random.choice([0.0, 0.001, 0.05]),
        log_bytes=1 << 20,
        momentum=random.choice([0.0, 0.5]),
        overlap=random.random() < 0.25,
        models=2 if more.random() < 0.2 and not large else 1,
        releases=False,
        standby=durable and not large and more.random() < 0.2,
        acknowledged_after=more.random() < 0.6,
        wire=more.choice(["raw", "raw", "raw", "int8", "topk:0.3"]),
        stale=None,
        table=more.random() < 0.3 and not large,
        rows_on_disk=Random(f"rows of {seed}").random() < 0.5,
        lease_seconds=5.0 if not large else 10.0,
        heartbeat_seconds=2.0 if not large else 2.5,
        delay_seconds=random.choice([0.001, 0.005, 0.05]) if not large else random.choice([0.001, 0.003]),
        calls_lost=random.choice([0.0, 0.02, 0.2]) if calls else 0.0,
        calls_late=random.choice([0.0, 0.02, 0.2]) if calls else 0.0,
        data_items=random.choice([0, size.workers * steps]) if not large or random.random() < 0.1 else 0,
        quiet_at=window,
        ends_at=window + 300.0,
        rows=_rows(size.shards, random),
        faults=faults,
    )
    moves = "move" in size.faults and more.random() < 0.3 and not large
    if not moves or not plan.keeps_acknowledged:
        return plan
    times = [more.uniform(1.5, plan.quiet_at) for _ in range(more.randrange(1, 4))]
    return replace(moving(plan), faults=in_order((*plan.faults, *(Fault(time, "move") for time in times))))


def _with_small_logs(plan: Plan, random: Random) -> Plan:
    """Some plans: logs reach their limit, and shards are killed while their disk is full."""
    if not plan.durable or plan.workers > 100 or random.random() < 0.7:
        return plan
    times = [random.uniform(0.2, 0.9) * plan.quiet_at for _ in range(random.randrange(1, 5))]
    return replace(
        plan,
        log_bytes=SMALL_LOG_BYTES,
        snapshot_seconds=random.choice([plan.snapshot_seconds, 0.0]),
        faults=in_order((*plan.faults, *(Fault(time, "full_restart") for time in times))),
    )


def _with_hosts(plan: Plan, size: Size, random: Random) -> Plan:
    """Workers are on hosts of one to four, and some end in the middle of a sum."""
    per_host = random.randrange(1, MOST_PER_HOST + 1)
    if size.workers > 100 or per_host == 1:
        return plan
    count = random.randrange(7) if "host" in size.faults else 0
    more = [Fault(random.uniform(1.0, plan.quiet_at), "host") for _ in range(count)]
    in_sync = random.random() < 0.3
    return replace(plan, per_host=per_host, per_host_in_sync=in_sync, faults=in_order((*plan.faults, *more)))


def _with_readers(plan: Plan, size: Size, random: Random) -> Plan:
    """Some plans: a worker publishes weights, and one or two processes read them, which are killed or stand still."""
    if size.workers > 100 or random.random() >= 0.25:
        return plan
    count = random.randrange(4) if "reader" in size.faults else 0
    more = [Fault(random.uniform(1.0, plan.quiet_at), "reader") for _ in range(count)]
    return replace(
        plan,
        readers=random.randrange(1, 3),
        publish_steps=random.choice([1, 1, 2]),
        keep_versions=random.randrange(1, 4),
        publish_waits=random.random() < 0.3,
        converts=random.random() < 0.3,
        faults=in_order((*plan.faults, *more)),
    )


def _with_relay(plan: Plan, size: Size, random: Random) -> Plan:
    """Some plans with readers: a relay is between them and the job, which in some of these is replaced by another."""
    if not plan.readers or random.random() < 0.4:
        return plan
    count = random.randrange(5) if "relay" in size.faults else 0
    more = [Fault(random.uniform(1.0, plan.quiet_at), "relay") for _ in range(count)]
    if {"checkpoint", "new_job"} <= {*size.faults} and not plan.releases and random.random() < 0.3:
        plan = replace(plan, durable=True, acknowledged_after=plan.acknowledged_after or plan.standby)
        more += [Fault(random.uniform(0.2, 0.6) * plan.quiet_at, "checkpoint") for _ in range(2)]
        more += [Fault(random.uniform(0.4, 1.0) * plan.quiet_at, "new_job")]
    return replace(
        plan,
        relayed=random.randrange(1, plan.readers + 1),
        relay_keeps=random.randrange(1, 4),
        relay_is_told_the_name=random.random() < 0.7,
        faults=in_order((*plan.faults, *more)),
    )


def _rows(shards: int, random: Random) -> tuple[int, ...]:
    """A model of which every shard gets something, whole variables and parts of one."""
    return (2 * shards, *(random.randrange(2, 5) for _ in range(shards)))
