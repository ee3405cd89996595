"""How a shard goes on with what it kept, and what comes to it when slices move: decided without a shard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.errors import InvalidRequest, ModelMismatch
from ps_protocol.model.spec import Slice
from ps_server.shard.reconcile import Reconciliation, check_fits, nbytes_on, reconcile
from ps_server.shard.transfer import TransferPlan, transfer_plan
from tests.shard.reshard.moving import map_of, spec_of

SPEC = spec_of()
HELD = map_of(SPEC, [0, 0, 1, 1, 0])
NEXT = map_of(SPEC, [0, 1, 2, 0, 2], epoch=2)


def test_what_is_placed_as_it_was_is_kept_whatever_was_prepared():
    assert reconcile(0, HELD, None, HELD) is Reconciliation.KEEP
    assert reconcile(0, HELD, NEXT, HELD) is Reconciliation.KEEP


def test_what_was_prepared_is_switched_to_where_the_cluster_says_so():
    assert reconcile(0, HELD, NEXT, NEXT) is Reconciliation.RESHARD


def test_what_has_left_is_reset():
    assert reconcile(0, HELD, None, map_of(SPEC, [1, 1, 1, 2, 2], epoch=7)) is Reconciliation.RESET
    assert reconcile(0, HELD, NEXT, map_of(SPEC, [1, 1, 1, 2, 2], epoch=2)) is Reconciliation.RESET


@pytest.mark.parametrize(
    ("pending", "placed"),
    [
        (None, NEXT),
        (map_of(SPEC, [0, 0, 2, 0, 2], epoch=2), NEXT),
        (NEXT, map_of(SPEC, [0, 1, 2, 0, 2], epoch=3)),
        (None, map_of(SPEC, [1, 1, 1, 1, 1])),
        (None, map_of(SPEC, [1, 1, 1, 1, 1], shards=2)),
        (None, replace(HELD, spec=spec_of("Adam"))),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(pending, placed):
    with pytest.raises(ModelMismatch):
        reconcile(0, HELD, pending, placed)


def test_a_model_that_a_shard_has_no_memory_for_is_refused_before_anything_is_laid_out():
    here = nbytes_on(0, HELD)
    assert here > 0
    check_fits(0, HELD, [], here)
    check_fits(0, HELD, [HELD], 2 * here)
    check_fits(7, HELD, [], 0)
    with pytest.raises(InvalidRequest, match=rf"does not fit on shard 0.*--max-model-bytes.*actual: {here} bytes"):
        check_fits(0, HELD, [HELD], 2 * here - 1)


def test_an_older_word_of_the_coordinator_is_named_as_the_cause():
    with pytest.raises(ModelMismatch, match="the coordinator's journal is older than this directory"):
        reconcile(0, NEXT, None, HELD)


def test_every_slice_comes_from_the_shard_that_has_it():
    assert transfer_plan(HELD, NEXT, 0) == [TransferPlan(1, ((1, 1),))]
    assert transfer_plan(HELD, NEXT, 1) == [TransferPlan(0, ((1, 0),))]
    assert transfer_plan(HELD, NEXT, 2) == [TransferPlan(0, ((2, 1),)), TransferPlan(1, ((0, 0),))]


def test_nothing_comes_to_a_shard_that_only_loses():
    assert transfer_plan(HELD, map_of(SPEC, [1, 1, 1, 1, 1], epoch=2), 0) == []


def test_slices_are_not_cut_again():
    cut = replace(NEXT, slices=(*NEXT.slices[:2], Slice(0, 4, 5, 2), Slice(0, 5, 6, 2), *NEXT.slices[3:]))
    with pytest.raises(InvalidRequest, match="slices only move"):
        transfer_plan(HELD, cut, 2)


def test_epochs_come_one_after_another():
    with pytest.raises(InvalidRequest, match="is not the next; shard: 2; expected: epoch 2; actual: epoch 3"):
        transfer_plan(HELD, replace(NEXT, epoch=3), 2)
