"""Failpoints are armed from a text, act once at the passage it names, and a wrong text starts nothing."""

from __future__ import annotations

import pytest

from ps_protocol.errors import ConfigError, InternalError
from ps_server.failpoints import Failpoints


def test_an_action_is_taken_at_the_passage_it_names_and_at_no_other():
    failpoints = Failpoints.parse("before_log=raise@2,after_apply_before_reply=raise@1")
    failpoints.hit("before_log")
    with pytest.raises(InternalError):
        failpoints.hit("before_log")
    failpoints.hit("before_log")
    failpoints.hit("after_log_before_apply")
    with pytest.raises(InternalError):
        failpoints.hit("after_apply_before_reply")


@pytest.mark.parametrize("text", ["before_log", "nowhere=kill@1", "before_log=explode@1", "before_log=kill@0", "x"])
def test_a_text_that_is_no_failpoint_is_refused(text):
    with pytest.raises(ConfigError, match=f"PS_FAILPOINTS holds no failpoint.*actual: {text}"):
        Failpoints.parse(f"after_apply_before_reply=stop@1,{text}")


def test_a_shard_that_is_told_of_no_failpoint_does_not_start(launch):
    cluster = launch(start=False)
    shard = cluster.shards[0]
    shard.launch(PS_FAILPOINTS="before_log")
    assert shard.wait() == 2
    assert "unset PS_FAILPOINTS: it is for tests" in shard.said
