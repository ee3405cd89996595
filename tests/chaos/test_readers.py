"""What readers of published weights cannot have seen."""

from __future__ import annotations

from typing import Any, cast

from chaos.readers import contradictions


class Seen:
    def __init__(self, seen: dict[int, str], failed: str = "") -> None:
        self.seen, self.failed = seen, failed


def judged(*seen: Seen) -> list[str]:
    return contradictions(cast("Any", seen))


def test_readers_that_agree_on_versions_that_rise_contradict_nobody() -> None:
    assert judged(Seen({1: "a", 3: "c"}), Seen({2: "b", 3: "c"})) == []


def test_each_contradiction_is_a_sentence() -> None:
    assert judged(Seen({1: "a", 2: "b"}), Seen({2: "c"})) == [
        "two readers saw different values in version 2 of the weights"
    ]
    assert judged(Seen({2: "b", 1: "a"})) == ["a reader saw versions of weights that do not rise: [2, 1]"]
    assert judged(Seen({})) == ["a reader saw no version of weights"]
    assert judged(Seen({1: "a"}, "Unavailable")) == ["a reader of published weights ended: Unavailable"]
