"""Ids, offsets, weights and settings that cannot be are refused before anything is looked up, saying what could."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import ConfigError, InvalidRequest, PsError, UnsupportedOptimizer
from ps_worker import rows
from ps_worker.tables import Embedding, EmbeddingBag, EmbeddingBags, Table
from tests.worker.tables.row_source import DenseRows, bind

IDS = torch.tensor([1, 2, 3])


def refused(module: nn.Module, *arguments: Any) -> str:
    source = DenseRows([torch.zeros(4, 2)], [0, 1, 2, 3])
    bind([module], source)
    with pytest.raises(InvalidRequest) as error:
        module(*arguments)
    assert source.lookups == []
    assert error.value.variable == "t"
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((IDS.float(), torch.tensor([0])), "float32"),
        ((IDS.bool(), torch.tensor([0])), "bool"),
        (([1, 2], torch.tensor([0])), "list"),
        ((IDS.to(torch.int16), torch.tensor([0])), "int16"),
        ((IDS.reshape(1, 1, 3),), "1-D with offsets, or 2-D"),
        ((torch.tensor(3),), "1-D with offsets, or 2-D"),
        ((IDS,), "without offsets"),
        ((IDS.reshape(1, 3), torch.tensor([0])), "offsets come with 2-D ids"),
        ((IDS, torch.tensor([0.0])), "offsets are of a wrong type"),
        ((IDS, torch.tensor([[0]])), "offsets are of a wrong type"),
        ((IDS, [0]), "offsets are of a wrong type"),
        ((IDS, torch.tensor([1, 2])), "do not begin with 0"),
        ((IDS, torch.tensor([0, 2, 1])), "offset 2 at least 2"),
        ((IDS, torch.tensor([0, 4])), "at most 3"),
        ((IDS, torch.tensor([0, -1])), "out of order"),
        ((IDS, torch.tensor([], dtype=torch.int64)), "ids are in no bag"),
        ((IDS, torch.tensor([0]), torch.ones(2)), "per_sample_weights have a wrong shape"),
        ((IDS, torch.tensor([0]), torch.ones(3, dtype=torch.float64)), "per_sample_weights are of a wrong type"),
        ((IDS, torch.tensor([0]), [1.0] * 3), "per_sample_weights are of a wrong type"),
    ],
)
def test_a_bad_batch_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    assert said in refused(EmbeddingBag(2, name="t", mode="sum"), *arguments)


def test_weights_go_with_sums_alone() -> None:
    assert "need mode 'sum'" in refused(EmbeddingBag(2, name="t", mode="mean"), IDS, torch.tensor([0]), torch.ones(3))


def test_a_last_offset_has_to_be_there() -> None:
    module = EmbeddingBag(2, name="t", include_last_offset=True)
    assert "at least one" in refused(module, IDS, torch.tensor([], dtype=torch.int64))


def test_an_embedding_takes_integers_alone() -> None:
    assert "float32" in refused(Embedding(2, name="t"), IDS.float())
    assert "NoneType" in refused(Embedding(2, name="t"), None)


@pytest.mark.parametrize("ids", [{}, {"a": IDS, "b": IDS}, {"b": IDS}])
def test_features_are_exactly_those_declared(ids: dict[str, torch.Tensor]) -> None:
    module = EmbeddingBags({"a": Table(2, name="t")})
    source = DenseRows([torch.zeros(4, 2)], [0, 1, 2, 3])
    bind([module], source)
    with pytest.raises(InvalidRequest, match="expected: a"):
        module(ids)
    with pytest.raises(InvalidRequest, match="expected: a"):
        module({"a": IDS[None]}, {"c": IDS})
    assert source.lookups == []


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"name": ""}, InvalidRequest, "name"),
        ({"buckets": 3}, InvalidRequest, "power of two"),
        ({"eviction": "fifo"}, ConfigError, "'lru'"),
        ({"admit_after": 2, "admit_probability": 0.5}, InvalidRequest, "one of"),
        ({"admit_after": 1 << 64}, InvalidRequest, "below 2"),
        ({"expire_after_updates": 1 << 64}, InvalidRequest, "below 2"),
        ({"max_rows": 1 << 64}, InvalidRequest, "below 2"),
        ({"memory": "16777216TB"}, InvalidRequest, "below 2"),
        ({"optimizer": rows.Adam(lr=-1)}, UnsupportedOptimizer, "lr"),
        ({"optimizer": rows.Adam(beta1=1.0)}, UnsupportedOptimizer, "beta1"),
        ({"init": rows.Uniform(1.0, -1.0)}, InvalidRequest, "low <= high"),
        ({"init": rows.Normal(std=float("nan"))}, InvalidRequest, "numbers between"),
        ({"seed": -1}, InvalidRequest, "seed"),
        ({"max_rows": 3}, InvalidRequest, "max_rows"),
        ({"memory": "lots"}, InvalidRequest, "no number of bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(settings: dict[str, Any], error: type[PsError], said: str) -> None:
    with pytest.raises(error) as raised:
        Table(**{"dim": 2, "name": "t", **settings})
    assert said in str(raised.value)


def test_the_memory_of_a_table_is_a_number_of_bytes_with_a_unit() -> None:
    assert Table(2, name="t", memory="4GB").spec(1).life.memory_bytes == 4 << 30


@pytest.mark.parametrize("dim", [0, -1, 1 << 20])
def test_a_row_has_a_sane_width(dim: int) -> None:
    with pytest.raises(InvalidRequest, match="dim"):
        Embedding(dim, name="t")


def test_modes_are_torch_s() -> None:
    with pytest.raises(ConfigError, match="'mean'"):
        EmbeddingBag(2, name="t", mode="median")
    with pytest.raises(ConfigError, match="'mean'"):
        EmbeddingBags({"f": (Table(2, name="t"), "median")})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dim": 3}, "dim"),
        ({"optimizer": rows.SGD()}, "optimizer"),
        ({"optimizer": rows.Adagrad(lr=0.5)}, "options"),
        ({"seed": 5}, "seed"),
        ({"init": rows.Constant(1.0)}, "init"),
        ({"expire_after_updates": 5}, "life"),
        ({"buckets": 16}, "buckets"),
    ],
)
def test_the_same_table_twice_with_other_settings_names_the_setting(settings: dict[str, Any], named: str) -> None:
    model = nn.ModuleList(
        [Embedding(2, name="t", init=rows.Constant(0.0)), Embedding(**{"table": 2, "name": "t", **renamed(settings)})]
    )
    with pytest.raises(InvalidRequest, match=f"other settings: .*{named}"):
        bind([model], DenseRows([], []))


def renamed(settings: dict[str, Any]) -> dict[str, Any]:
    return {"init": rows.Constant(0.0), **{"table" if key == "dim" else key: value for key, value in settings.items()}}


def test_equal_settings_mean_the_same_table_and_a_module_may_be_given_for_one() -> None:
    one = Embedding(2, name="t")
    other, third = EmbeddingBag(2, name="t"), EmbeddingBag(one, mode="max")
    bound = bind([one, other, third], DenseRows([torch.zeros(1, 2)], [0]))
    assert len(bound.specs) == 1
    assert third.tables == one.tables


def test_a_shared_table_takes_no_settings_of_its_own() -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        Embedding(Table(2, name="t"), seed=4)
    with pytest.raises(InvalidRequest, match="not a table"):
        Embedding(EmbeddingBags({"a": Table(2, name="t"), "b": Table(2, name="u")}))
    with pytest.raises(InvalidRequest, match="not a table"):
        Embedding("t")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="without a feature"):
        EmbeddingBags({})


def test_a_table_belongs_to_one_model_at_a_time() -> None:
    module = Embedding(2, name="t")
    bound = bind([module], DenseRows([torch.zeros(1, 2)], [0]))
    with pytest.raises(InvalidRequest, match="another model"):
        bind([module], DenseRows([torch.zeros(1, 2)], [0]))
    bound.closed = True
    with pytest.raises(InvalidRequest, match="closed"):
        module(torch.tensor([0]))
    bind([module], DenseRows([torch.zeros(1, 2)], [0]))
    module(torch.tensor([0]))
