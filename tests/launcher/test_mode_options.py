"""The flags of a consistency mode: what is written for a program is what it reads."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from ps_protocol.model import Consistency, Mode, StalePolicy
from ps_server.mode_options import MODES, bound_options, consistency_of, flags_of


@click.command()
@click.option("--mode", type=MODES, default="async")
@bound_options
def shown(**flags: Any) -> None:
    click.echo(repr(consistency_of(**flags)))


@pytest.mark.parametrize(
    "consistency",
    [
        Consistency(),
        Consistency(Mode.SSP, staleness=0),
        Consistency(Mode.SSP, staleness=7, stale_policy=StalePolicy.SCALE, stale_threshold=2),
        Consistency(Mode.ASYNC, stale_policy=StalePolicy.REJECT, stale_threshold=5),
        Consistency(Mode.SYNC, backup=1),
    ],
    ids=str,
)
def test_the_flags_of_a_mode_are_read_back_as_that_mode(consistency: Consistency) -> None:
    assert CliRunner().invoke(shown, flags_of(consistency)).output == repr(consistency) + "\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--staleness", "1"], "only in ssp"),
        (["--backup", "1"], "only in sync"),
        (["--mode", "sync", "--stale-policy", "scale"], "only in async and ssp"),
        (["--stale-threshold", "3"], "needs --stale-policy"),
    ],
)
def test_a_flag_that_means_nothing_in_its_mode_is_a_usage_error(flags: list[str], text: str) -> None:
    result = CliRunner().invoke(shown, flags)
    assert result.exit_code == 2
    assert text in result.output
