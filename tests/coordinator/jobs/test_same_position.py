"""Shards that have accepted the same pushes are at one point only if the same of them wait for their round."""

import pytest

from ps_protocol.cluster.model_status import ModelPosition
from ps_server.coordinator.jobs.quiesce import QuiesceLost, check_same_position

APPLIED = ModelPosition("model", {(0, 5): 3, (1, 6): 2})
HELD = ModelPosition("model", {(0, 5): 3, (1, 6): 2}, {(1, 6): 2})


def test_a_push_that_is_held_here_and_applied_there_is_no_one_point():
    with pytest.raises(QuiesceLost, match="not at one point of model 'model'"):
        check_same_position([[APPLIED], [HELD]])


def test_shards_that_hold_the_same_pushes_are_at_one_point():
    check_same_position([[HELD], [HELD], [ModelPosition("other", {})]])
