"""Tables in the cluster's state: what can be declared, in what declarations differ, and that tables are kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.errors import InvalidRequest, ModelMismatch, PsError, UnsupportedOptimizer
from ps_protocol.model.spec import ModelSpec, ShardMap
from ps_protocol.model.tables import Eviction, RowInit, RowLife
from ps_server.checkpoint.checkpoint import Checkpoint, check_same_model
from ps_server.checkpoint.manifest import Manifest
from ps_server.checkpoint.record import ModelRecord
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.settings import ClusterSettings
from ps_server.model_differences import in_structure
from tests.coordinator.cluster import Cluster, declare
from tests.coordinator.persistence.test_persisted_state import restarted
from tests.coordinator.tables import model, table


def cluster(shards: int = 1) -> Cluster:
    c = Cluster(expected_shards=shards)
    for number in range(shards):
        c.shard(number)
    return c


def test_a_model_of_tables_alone_is_placed_on_every_shard() -> None:
    c = cluster(3)
    spec = model(table("a", 4), table("b", 4))
    worker = c.worker()
    decision = c.declaration(worker, spec)
    assert decision.value.tables == ((0, 0, 1, 2), (0, 1, 1, 2))
    assert "2 tables" in decision.reason
    assert c.declare(c.worker(), spec) is decision.value


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (model(table(name="")), InvalidRequest, "a name that cannot be"),
        (model(table(dim=0)), InvalidRequest, "a dim that cannot be; variable: emb; expected: 1 to"),
        (model(table(buckets=3)), InvalidRequest, "a power of two"),
        (model(table(init=RowInit("zipf"))), InvalidRequest, "an init that cannot be; variable: emb"),
        (model(table(life=RowLife(max_rows=3))), InvalidRequest, "max_rows"),
        (model(table(life=RowLife(admit_after=2, admit_probability=0.5))), InvalidRequest, "admit_probability"),
        (model(table(optimizer="lamb", options={})), UnsupportedOptimizer, "expected: sgd, adagrad"),
        (model(table(optimizer="sgd", options={"lr": 1.0})), UnsupportedOptimizer, "weight_decay, max_norm"),
        (model(table(), table()), InvalidRequest, "this name twice; variable: emb"),
        (model(table("w"), rows=4), InvalidRequest, "this name twice; variable: w"),
        (model(table("ok"), table("bad", dim=-1)), InvalidRequest, "variable: bad"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name_and_nothing_is_placed(
    spec: ModelSpec, error: type[PsError], text: str
) -> None:
    c = cluster()
    with pytest.raises(error, match=text):
        c.declare(c.worker(), spec)
    assert c.state.view.models == {}


def test_a_model_with_neither_parameters_nor_tables_is_refused_and_the_remedy_names_both() -> None:
    c = cluster()
    with pytest.raises(InvalidRequest, match=r"remedy: .*trainable parameter or one table"):
        c.declare(c.worker(), model())


def test_another_declaration_of_tables_lists_every_difference() -> None:
    c = cluster()
    c.declare(c.worker(), model(table("a"), table("b"), table("c"), rows=4))
    other = table(
        "a",
        buckets=32,
        optimizer="ftrl",
        dim=4,
        seed=8,
        init=RowInit("normal", 0.0, 0.01),
        options={"lr": 0.5},
        life=RowLife(2, 0.0, 9, 1.5, 1000, Eviction.LFU),
    )
    with pytest.raises(ModelMismatch) as caught:
        c.declare(c.worker(), model(table("d"), table("b", options={"lr": 0.02}), other, rows=4))
    assert [line.strip() for line in caught.value.message.splitlines()[1:]] == [
        "table 'a': dim 4 instead of 8",
        "table 'a': buckets 32 instead of 16",
        "table 'a': seed 8 instead of 7",
        "table 'a': init normal(0.0, 0.01) instead of uniform(-0.1, 0.1)",
        "table 'a': optimizer ftrl instead of adagrad",
        "table 'c' is missing",
        "table 'd' is extra",
        "the tables are in another order",
        "table 'a': eps absent instead of 1e-10",
        "table 'a': initial absent instead of 0.0",
        "table 'a': lr 0.5 instead of 0.01",
        "table 'a': lr_decay absent instead of 0.0",
        "table 'a': max_norm absent instead of 0.0",
        "table 'a': admit_after 2 instead of 0",
        "table 'a': eviction 'lfu' instead of 'refuse'",
        "table 'a': expire_after_seconds 1.5 instead of 0.0",
        "table 'a': expire_after_updates 9 instead of 0",
        "table 'a': max_rows 1000 instead of 0",
        "table 'b': eps absent instead of 1e-10",
        "table 'b': initial absent instead of 0.0",
        "and 3 more",
    ]


def test_an_unused_number_of_an_init_is_no_difference() -> None:
    first, later = (model(table(init=RowInit("constant", 0.5, high))) for high in (0.0, 1.0))
    assert list(in_structure(first, later)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dim": 4}, "dim 4 instead of 8"),
        ({"seed": 1}, "seed 1 instead of 7"),
        ({"init": RowInit("uniform", -0.1, 0.1000001)}, r"init uniform\(-0.1, 0.1000001\)"),
        ({"buckets": 8}, "buckets 8 instead of 16"),
        ({"optimizer": "sgd"}, "optimizer sgd instead of adagrad"),
    ],
)
def test_a_saved_table_goes_on_only_with_what_its_rows_depend_on(change: dict[str, Any], said: str) -> None:
    saved = model(table("a"), table("b"))
    with pytest.raises(ModelMismatch, match=said):
        check_same_model(saved, model(table("a"), table("b", **change)), "/there")
    again = model(table("b", options={"lr": 9.0}, life=RowLife(admit_after=3)), table("a"))
    check_same_model(saved, again, "/there")


def test_tables_and_where_they_lie_outlive_the_coordinator() -> None:
    c = cluster(2)
    worker = c.worker()
    life = RowLife(0, 0.25, 9, 1.5, 1000, Eviction.LRU)
    spec = model(table(life=life, seed=(1 << 64) - 1), rows=4)
    shard_map = c.declare(worker, spec)
    again = restarted(c)
    assert again.state.placement.shard_map("net") == shard_map
    assert again.declare(worker, spec) == shard_map


@pytest.mark.parametrize(("shards", "owners"), [(2, (1, 0, 0, 1)), (3, (0, 0, 1, 2))])
def test_a_restored_job_has_its_tables_on_any_number_of_shards(shards: int, owners: tuple[int, ...]) -> None:
    spec = model(table("emb", 4))
    known = ShardMap(7, spec, 3, (), tables=((2, 0, 0, 2),))
    facts = {"phase": 3, "data": DataLeases().persisted_state()}
    saved = Checkpoint(Path("/there"), Manifest("1", 0.0, facts, {"net": ModelRecord("net", known, (), (), ())}))
    driver = Driver(ClusterSettings(expected_shards=shards), saved=saved)
    for number in range(shards):
        driver.join(JoinRequest(Role.SHARD, number, f"host:{number}", f"shard {number}"))
    worker = driver.join(JoinRequest(Role.WORKER, 0, "", "worker")).member
    faster = replace(spec.tables[0], options={**spec.tables[0].options, "lr": 1.0})
    placed = declare(driver, worker, replace(spec, tables=(faster,)))
    assert (placed.tables, placed.restored_from) == ((owners,), "/there")
    with pytest.raises(ModelMismatch, match="no model 'new'"):
        declare(driver, worker, model(table(), name="new"))
