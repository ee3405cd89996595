"""The settings of a consistency mode, shared by ps-coordinator, ps-run and psctl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from ps_protocol.errors import PsError
from ps_protocol.model.spec import DEFAULT_STALENESS, WORKERS, Consistency, Mode, StalePolicy, StaleRule
from ps_protocol.text import whole_number
from ps_server.settings import Finite, setting

MODES = click.Choice([mode.value for mode in Mode])


class Threshold(click.ParamType[Any, Any]):
    """A number of updates, or "workers"."""

    name = "updates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """As in click."""
        threshold = value if value == WORKERS else whole_number(str(value))
        try:
            if threshold is not None:
                StaleRule.of(StalePolicy.SCALE.value, threshold)
                return threshold
        except PsError:
            pass
        return self.fail(f"{value!r} is neither a number from 0 nor '{WORKERS}'.", param, ctx)


@dataclass(frozen=True, slots=True)
class ModeOptions:
    """The options that refine a mode; None where they are not given."""

    staleness: int | None = setting(
        None,
        f"ssp: number of steps by which a worker may be ahead of the slowest.  [default: {DEFAULT_STALENESS}]",
        click.IntRange(0),
    )
    backup: int | None = setting(
        None,
        "sync: number of workers whose gradients a step may omit: it is applied when those of all other live "
        "workers have arrived.  [default: 0]",
        click.IntRange(0),
    )
    grace_seconds: float | None = setting(
        None,
        "sync with --backup: how long a step that could be applied waits for the missing gradients.  [default: 0]",
        Finite(0),
    )
    stale_policy: StalePolicy | None = setting(
        None,
        "async and ssp: what happens to a gradient whose staleness is above the threshold. reject: it is dropped. "
        "scale: its learning rate is multiplied by threshold / staleness.  [default: accept]",
    )
    stale_threshold: int | str | None = setting(
        None,
        "Staleness, in updates, above which a gradient is rejected or scaled: a number, or 'workers' for the number of "
        "live workers.  [default: workers]",
        Threshold(),
    )

    def consistency(self, mode: str) -> Consistency:
        """``mode`` with these options. Raises click.UsageError for an option that has no effect in it."""
        chosen = Mode(mode)
        meanings = (
            ("--staleness", self.staleness, [mode for mode in Mode if mode.takes_staleness]),
            ("--backup", self.backup, [mode for mode in Mode if mode.collects]),
            ("--grace-seconds", self.grace_seconds, [mode for mode in Mode if mode.collects]),
            ("--stale-policy", self.stale_policy, [mode for mode in Mode if not mode.collects]),
            ("--stale-threshold", self.stale_threshold, [mode for mode in Mode if not mode.collects]),
        )
        for flag, value, modes in meanings:
            if value is not None and chosen not in modes:
                raise click.UsageError(
                    f"{flag} has no effect in mode {mode}, only in {' and '.join(m.value for m in modes)}"
                )
        policy = self.stale_policy or StalePolicy.ACCEPT
        if self.stale_threshold is not None and policy is StalePolicy.ACCEPT:
            raise click.UsageError("--stale-threshold needs --stale-policy reject or scale")
        if self.grace_seconds is not None and not self.backup:
            raise click.UsageError("--grace-seconds needs --backup: without it a step waits for every live worker")
        return Consistency(
            chosen,
            chosen.default_staleness if self.staleness is None else self.staleness,
            self.backup or 0,
            grace_seconds=self.grace_seconds or 0.0,
        ).with_rule(StaleRule.of(policy.value, self.stale_threshold))
