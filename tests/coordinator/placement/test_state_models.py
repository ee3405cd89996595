from dataclasses import replace

import pytest

from ps_protocol.errors import Fenced, InvalidRequest, ModelMismatch, NotReady, UnknownModel
from ps_protocol.model.spec import Buffers, Consistency, DType, Kind, Mode, ModelSpec, StalePolicy, Variable
from tests.coordinator.cluster import SPEC, Cluster


def test_the_first_declaration_is_placed_and_the_same_one_again_gets_the_same_map() -> None:
    c = Cluster(expected_shards=2)
    c.shard(0), c.shard(1)
    shard_map = c.declare(c.worker())
    assert shard_map.shards == 2
    assert c.declare(c.worker()) is shard_map
    assert c.state.placement.shard_map("net") is shard_map
    assert c.state.view.models == {"net": 1}


def test_declaring_before_all_shards_are_there_names_the_missing_ones() -> None:
    c = Cluster(expected_shards=3)
    c.shard(1)
    with pytest.raises(NotReady, match=r"2 of 3 shards are missing; shard: 0, 2"):
        c.declare(c.worker())


def test_a_known_model_can_be_declared_while_a_shard_is_away() -> None:
    c = Cluster()
    shard, worker = c.shard(), c.worker()
    shard_map = c.declare(worker)
    c.leave(shard)
    assert c.declare(worker) is shard_map


def test_a_mismatch_lists_every_difference_at_once() -> None:
    c = Cluster()
    c.shard()
    c.declare(c.worker())
    other = ModelSpec(
        "net",
        "torch.optim.Adam",
        (
            Variable("w", (100, 8), DType.FLOAT64),
            Variable("extra", (2,), DType.FLOAT32),
            Variable("mean", (4,), DType.FLOAT32, Kind.BUFFER),
        ),
        ({"lr": 0.2, "eps": 1e-8}, {"lr": 1}),
        buffers=Buffers.LOCAL,
    )
    with pytest.raises(ModelMismatch) as caught:
        c.declare(c.worker(), other)
    lines = caught.value.message.splitlines()
    assert lines[0] == "worker 1 declared model 'net' differently from the first worker, 9 differences:"
    assert [line.strip() for line in lines[1:]] == [
        "optimizer: torch.optim.Adam instead of torch.optim.SGD",
        "variable 'w': shape (100, 8) instead of (100, 4)",
        "variable 'w': dtype float64 instead of float32",
        "variable 'b' is missing",
        "variable 'extra' is extra",
        "parameter groups: 2 instead of 1",
        "parameter group 0: eps 1e-08 instead of absent",
        "parameter group 0: lr 0.2 instead of 0.1",
        "buffer policy: local instead of rank0",
    ]
    assert caught.value.remedy


def test_another_order_of_variables_is_a_mismatch() -> None:
    c = Cluster()
    c.shard()
    worker = c.worker()
    c.declare(worker)
    with pytest.raises(ModelMismatch, match="another order"):
        c.declare(worker, replace(SPEC, variables=SPEC.variables[::-1]))


def test_a_mismatch_of_a_thousand_variables_stays_readable() -> None:
    c = Cluster()
    c.shard()
    worker = c.worker()
    many = tuple(Variable(f"layer{i}.weight", (10, 10), DType.FLOAT32) for i in range(1000))
    c.declare(worker, replace(SPEC, variables=many))
    with pytest.raises(ModelMismatch, match=r"1000 differences(.|\n)*and 980 more"):
        c.declare(worker, replace(SPEC, variables=tuple(replace(v, shape=(1,)) for v in many)))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (replace(SPEC, name=""), "needs a name"),
        (replace(SPEC, variables=SPEC.variables[2:]), "no parameters"),
        (replace(SPEC, variables=SPEC.variables * 2), "twice; variable: w"),
        (replace(SPEC, variables=(Variable("w", (-1,), DType.FLOAT32),)), "negative; variable: w"),
        (replace(SPEC, variables=(Variable("w", (1,), DType.FLOAT32, group=1),)), "group that does not exist"),
    ],
)
def test_a_model_that_cannot_be_placed_is_refused_and_leaves_its_name_free(spec: ModelSpec, text: str) -> None:
    c = Cluster()
    c.shard()
    worker = c.worker()
    with pytest.raises(InvalidRequest, match=text):
        c.declare(worker, spec)
    assert c.state.view.models == {}


def test_a_fenced_worker_cannot_declare() -> None:
    c = Cluster()
    old = c.worker(0)
    c.worker(0)
    with pytest.raises(Fenced):
        c.declare(old)


def test_an_unknown_model_is_named_with_those_that_are_known() -> None:
    c = Cluster()
    c.shard()
    c.declare(c.worker())
    with pytest.raises(UnknownModel, match="'other' has been declared; expected: 'net'"):
        c.state.placement.shard_map("other")


# Consistency


def test_a_change_of_mode_shows_in_the_view_and_a_repetition_does_not() -> None:
    c = Cluster(expected_workers=4)
    sync = Consistency(Mode.SYNC, backup=1)
    assert c.state.set_consistency(sync).reason == "consistency changed from async to sync(backup=1)"
    revision = c.state.view.revision
    assert c.state.view.consistency == sync
    assert c.state.set_consistency(sync).reason == ""
    assert c.state.view.revision == revision


@pytest.mark.parametrize(
    "consistency",
    [
        Consistency(Mode.SYNC, backup=4),
        Consistency(Mode.ASYNC, backup=1),
        Consistency(Mode.ASYNC, staleness=3),
        Consistency(Mode.SSP, staleness=-1),
        Consistency(Mode.SYNC, stale_policy=StalePolicy.REJECT),
    ],
)
def test_a_mode_that_cannot_work_is_refused_and_the_old_one_stays(consistency: Consistency) -> None:
    c = Cluster(expected_workers=4)
    view = c.state.view
    with pytest.raises(InvalidRequest):
        c.state.set_consistency(consistency)
    assert c.state.view is view


def test_backup_needs_a_fixed_number_of_workers() -> None:
    with pytest.raises(InvalidRequest, match="--workers"):
        Cluster().state.set_consistency(Consistency(Mode.SYNC, backup=1))
