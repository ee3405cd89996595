"""Rules for stale gradients as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.spec import Consistency, StalePolicy, StaleRule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("accept", StaleRule()),
        ("scale", StaleRule(StalePolicy.SCALE, by_workers=True)),
        ("scale:workers", StaleRule(StalePolicy.SCALE, by_workers=True)),
        ("scale:0", StaleRule(StalePolicy.SCALE, 0)),
        ("reject:8", StaleRule(StalePolicy.REJECT, 8)),
    ],
)
def test_a_rule_is_a_policy_with_a_number_or_the_workers(text: str, rule: StaleRule) -> None:
    assert StaleRule.parse(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "scale:",
        "slow",
        "SCALE",
        "accept:3",
        "scale:-1",
        "scale:2.5",
        "scale:x",
        "reject:1:2",
        "reject:²",
        "scale:٤",
        "scale: 4",
        "scale:1_0",
        4,
    ],
)
def test_what_is_no_rule_is_one_error_with_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match="unknown rule for stale gradients; expected: 'accept', 'scale' or 'reject'"):
        StaleRule.parse(text)
    with pytest.raises(ConfigError, match="unknown rule"):
        StaleRule.parse("reject:" + "9" * 5000)


@pytest.mark.parametrize("threshold", [-1, 1 << 49, 2.5, float("nan"), True, b"1"])
def test_a_threshold_out_of_range_is_refused(threshold: int) -> None:
    with pytest.raises(InvalidRequest, match=r"a whole number from 0 to .*, or 'workers'"):
        Consistency.of("async", stale_policy="scale", stale_threshold=threshold)


def test_a_threshold_that_is_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="stale_threshold; expected: a whole number"):
        Consistency.of("async", stale_policy="scale", stale_threshold="shards")


def test_the_rule_is_shown_with_the_mode() -> None:
    assert str(Consistency.of("ssp", stale_policy="scale")) == "ssp(4), scale above the number of workers"
    assert str(Consistency.of("async", stale_policy="reject", stale_threshold=3)) == "async, reject above 3"
    assert str(Consistency.of("async", stale_threshold="workers")) == "async"


@pytest.mark.parametrize("threshold", [0, 3])
def test_a_threshold_without_a_policy_is_refused(threshold: int) -> None:
    with pytest.raises(ConfigError, match=f"no effect.*stale_threshold={threshold}; remedy: give a stale_policy"):
        Consistency.of("async", stale_threshold=threshold)


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("async", {"staleness": 2}),
        ("sync", {"staleness": 2}),
        ("ssp", {"backup": 1}),
        ("async", {"grace_seconds": 0.5}),
        ("sync", {"grace_seconds": 0.5}),
        ("sync", {"stale_policy": "scale"}),
    ],
)
def test_what_has_no_effect_in_a_mode_is_refused(mode: str, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name} has no effect in mode '{mode}'.*leave {name} out"):
        Consistency.of(mode, **given)
