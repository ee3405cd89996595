"""Decides what a swarm is: a run with many faults of few kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from simulation.plan import Fault, Plan

_LEAST, _MOST = 8, 20
_SHORTEST = 8.0

_PLACEMENT = ("move", "balance", "release")


def as_swarm(plan: Plan, kinds: Sequence[str], random: Random) -> Plan:
    """``plan`` with 8 to 20 faults of one to five of ``kinds``, in place of its own.

    A test that leaves most features out meets more often what the others do together: Groce, Zhang, Eide, Chen and
    Regehr, "Swarm Testing", 2012. Moves and changes of the mode are in more swarms than others.
    """
    chosen = _chosen(kinds, random)
    if "restore" in chosen:
        chosen.append("checkpoint")
        plan = replace(plan, durable=True, acknowledged_after=plan.acknowledged_after or plan.standby)
        if Random(f"restores of {plan.seed}").random() < 0.4:
            chosen, plan = [kind for kind in chosen if kind not in _PLACEMENT], replace(plan, table=False)
        elif "release" in chosen:
            # A later model of the name may lie elsewhere: what the judge has of a shard must fit each element there.
            plan = replace(plan, momentum=0.0, wire="raw")
    if {"move", "balance"} & {*chosen}:
        plan = moving(plan)
        if random.random() < 0.4:
            plan = replace(plan, table=True, overlap=False)
    if "release" in chosen:
        plan = _releasing(plan, random.choice([2, 3]))
    if random.random() < 0.5:
        plan = replace(plan, calls_lost=0.0, calls_late=0.0)
    seconds = max(plan.quiet_at, _SHORTEST)
    count = random.randrange(_LEAST, _MOST + 1) if chosen else 0
    faults = [Fault(random.uniform(0.5, seconds), random.choice(chosen)) for _ in range(count)]
    jobs = Random(f"jobs of {plan.seed}")
    if "new_job" in kinds and "checkpoint" in chosen and "release" not in chosen and jobs.random() < 0.5:
        # The models of a later phase are in no checkpoint before it: a new job would not have them.
        plan = replace(plan, durable=True, acknowledged_after=plan.acknowledged_after or plan.standby)
        faults += [Fault(jobs.uniform(0.3, 1.0) * seconds, "new_job") for _ in range(jobs.randrange(1, 3))]
    return replace(
        plan,
        quiet_at=seconds,
        ends_at=plan.ends_at + seconds - plan.quiet_at,
        think_seconds=plan.think_seconds * seconds / plan.quiet_at,
        faults=in_order(faults),
    )


def moving(plan: Plan) -> Plan:
    """``plan`` with slices that move. The order of updates must not matter, and each element brings the same.

    The judge adds up what each slice brings along; and no push that was acknowledged may be lost.
    """
    return replace(
        plan,
        durable=True,
        acknowledged_after=plan.acknowledged_after or plan.standby,
        momentum=0.0,
        wire="raw",
        models=1,
        table=False,
    )


def _releasing(plan: Plan, phases: int) -> Plan:
    """``plan`` with a model that is released at the end of each phase, and as many steps."""
    steps = -(-plan.steps * plan.phases // phases)
    items = plan.workers * steps if plan.data_items else 0
    return replace(plan, models=2, releases=True, phases=phases, steps=steps, data_items=items)


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """``faults`` by their times."""
    return tuple(sorted(faults, key=lambda fault: fault.time))


def _chosen(kinds: Sequence[str], random: Random) -> list[str]:
    others = [kind for kind in kinds if kind not in ("calls", "new_job", "full_restart", "host", "reader", "relay")]
    chosen = random.sample(others, min(len(others), random.randrange(1, 4)))
    for often in ("move", "mode"):
        if random.random() < 0.6 and often in kinds and often not in chosen:
            chosen.append(often)
    return chosen
