"""The flags of a consistency mode."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import DEFAULT_STALENESS, Consistency, Mode, StalePolicy
from ps_protocol.wire.convert.model import CONSISTENCY
from ps_server.cli.options.mode import MODES, ModeOptions
from ps_server.coordinator.settings import check_consistency
from ps_server.settings import configured, options


@click.command()
@click.option("--mode", type=MODES, default="async")
@options(ModeOptions)
def shown(mode: str, **bounds: Any) -> None:
    click.echo(repr(configured(ModeOptions, bounds).consistency(mode)))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", Consistency()),
        ("--mode ssp --staleness 0", Consistency(Mode.SSP, staleness=0)),
        (
            "--mode ssp --staleness 7 --stale-policy scale --stale-threshold 2",
            Consistency(Mode.SSP, staleness=7, stale_policy=StalePolicy.SCALE, stale_threshold=2),
        ),
        (
            "--stale-policy reject --stale-threshold 5",
            Consistency(Mode.ASYNC, stale_policy=StalePolicy.REJECT, stale_threshold=5),
        ),
        ("--stale-policy scale", Consistency(stale_policy=StalePolicy.SCALE, stale_by_workers=True)),
        ("--stale-policy reject --stale-threshold workers", Consistency.of("async", stale_policy="reject")),
        ("--mode sync --backup 1", Consistency(Mode.SYNC, backup=1)),
        ("--mode sync --backup 2 --grace-seconds 0.5", Consistency(Mode.SYNC, backup=2, grace_seconds=0.5)),
    ],
)
def test_flags_select_a_mode_and_its_bounds(flags: str, expected: Consistency) -> None:
    assert CliRunner().invoke(shown, flags).output == repr(expected) + "\n"


def test_ssp_without_a_bound_has_the_default_one() -> None:
    expected = repr(Consistency(Mode.SSP, staleness=DEFAULT_STALENESS)) + "\n"
    assert CliRunner().invoke(shown, ["--mode", "ssp"]).output == expected


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--staleness", "1"], "only in ssp"),
        (["--backup", "1"], "only in sync"),
        (["--grace-seconds", "1"], "only in sync"),
        (["--mode", "sync", "--grace-seconds", "1"], "needs --backup"),
        (["--mode", "sync", "--backup", "1", "--grace-seconds", "-1"], "not in the range"),
        (["--mode", "sync", "--stale-policy", "scale"], "only in async and ssp"),
        (["--stale-threshold", "3"], "needs --stale-policy"),
        (["--stale-policy", "scale", "--stale-threshold", "-1"], "neither a number from 0 nor 'workers'"),
        (["--stale-policy", "scale", "--stale-threshold", "many"], "neither a number from 0 nor 'workers'"),
        (["--stale-policy", "scale", "--stale-threshold", "٤"], "neither a number from 0 nor 'workers'"),
        (["--stale-policy", "scale", "--stale-threshold", "2.5"], "neither a number from 0 nor 'workers'"),
    ],
)
def test_a_flag_that_means_nothing_in_its_mode_is_a_usage_error(flags: list[str], text: str) -> None:
    result = CliRunner().invoke(shown, flags)
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.parametrize(
    ("consistency", "text"),
    [
        (Consistency(Mode.SYNC, grace_seconds=1.0), "needs sync with backup"),
        (Consistency(Mode.SSP, grace_seconds=1.0), "needs sync with backup"),
        (Consistency(Mode.SYNC, backup=1, grace_seconds=-1.0), "not negative"),
        (Consistency(Mode.SYNC, backup=1, grace_seconds=float("nan")), "not negative"),
    ],
    ids=str,
)
def test_a_grace_time_that_cannot_be_kept_is_refused_by_the_coordinator(consistency: Consistency, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        check_consistency(consistency, expected_workers=3)


def test_a_grace_time_is_shown_and_sent_with_its_mode() -> None:
    consistency = Consistency(Mode.SYNC, backup=1, grace_seconds=0.25)
    assert str(consistency) == "sync(backup=1, grace 0.25 s)"
    assert CONSISTENCY.from_pb(CONSISTENCY.to_pb(consistency)) == consistency
    check_consistency(consistency, expected_workers=2)
