"""The options that select a consistency mode, shared by ps-coordinator, ps-run and psctl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ps_protocol.model.spec import DEFAULT_STALENESS, Consistency, Mode, StalePolicy

MODES = click.Choice([mode.value for mode in Mode])


def bound_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that refine a mode; the command gets them as ``staleness``, ``backup``, ``grace_seconds``,
    ``stale_policy`` and ``stale_threshold``, None where not given.
    """
    options = (
        click.option(
            "--staleness",
            type=click.IntRange(0),
            help=f"ssp: number of steps by which a worker may be ahead of the slowest.  [default: {DEFAULT_STALENESS}]",
        ),
        click.option(
            "--backup",
            type=click.IntRange(0),
            help="sync: number of workers whose gradients a step may omit: it is applied when those of all other live "
            "workers have arrived.  [default: 0]",
        ),
        click.option(
            "--grace-seconds",
            type=click.FloatRange(0),
            help="sync with --backup: how long a step that could be applied waits for the missing gradients.  "
            "[default: 0]",
        ),
        click.option(
            "--stale-policy",
            type=click.Choice([policy.value for policy in StalePolicy]),
            help="async and ssp: what happens to a gradient whose staleness is above the threshold.  [default: accept]",
        ),
        click.option(
            "--stale-threshold",
            type=click.IntRange(0),
            help="Staleness above which a gradient is rejected or scaled.  [default: 0]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def consistency_of(
    mode: str,
    staleness: int | None,
    backup: int | None,
    grace_seconds: float | None,
    stale_policy: str | None,
    stale_threshold: int | None,
) -> Consistency:
    """The mode that the flags ask for. Raises click.UsageError for a flag that has no effect in this mode."""
    chosen = Mode(mode)
    meanings = (
        ("--staleness", staleness, [mode for mode in Mode if mode.takes_staleness]),
        ("--backup", backup, [mode for mode in Mode if mode.collects]),
        ("--grace-seconds", grace_seconds, [mode for mode in Mode if mode.collects]),
        ("--stale-policy", stale_policy, [mode for mode in Mode if not mode.collects]),
        ("--stale-threshold", stale_threshold, [mode for mode in Mode if not mode.collects]),
    )
    for flag, value, modes in meanings:
        if value is not None and chosen not in modes:
            raise click.UsageError(
                f"{flag} has no effect in mode {mode}, only in {' and '.join(m.value for m in modes)}"
            )
    policy = StalePolicy(stale_policy) if stale_policy else StalePolicy.ACCEPT
    if stale_threshold is not None and policy is StalePolicy.ACCEPT:
        raise click.UsageError("--stale-threshold needs --stale-policy reject or scale")
    if grace_seconds is not None and not backup:
        raise click.UsageError("--grace-seconds needs --backup: without it a step waits for every live worker")
    return Consistency(
        chosen,
        chosen.default_staleness if staleness is None else staleness,
        backup or 0,
        policy,
        stale_threshold or 0,
        grace_seconds or 0.0,
    )


def flags_of(consistency: Consistency) -> list[str]:
    """The flags that select ``consistency``: those that have an effect in its mode."""
    flags = ["--mode", consistency.mode.value]
    if consistency.mode.takes_staleness:
        flags += ["--staleness", str(consistency.staleness)]
    if consistency.mode.collects:
        flags += ["--backup", str(consistency.backup)]
        flags += ["--grace-seconds", str(consistency.grace_seconds)] if consistency.grace_seconds else []
    elif consistency.stale_policy is not StalePolicy.ACCEPT:
        flags += ["--stale-policy", consistency.stale_policy.value]
        flags += ["--stale-threshold", str(consistency.stale_threshold)]
    return flags
