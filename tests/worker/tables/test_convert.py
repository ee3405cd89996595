"""Which embeddings of a model become tables, and what they keep."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest
from ps_worker import rows
from ps_worker.tables import Embedding, EmbeddingBag
from ps_worker.tables.converted import convert_embeddings


class Own(nn.Embedding):
    """A subclass may do more than look rows up."""


def test_large_embeddings_become_tables_named_by_their_paths_with_their_weights() -> None:
    model = nn.ModuleDict(
        {
            "deep": nn.Sequential(nn.EmbeddingBag(20, 3, mode="max", include_last_offset=True, padding_idx=4)),
            "user": nn.Embedding(20, 2, padding_idx=1),
            "small": nn.Embedding(19, 2),
            "own": Own(20, 2),
            "frozen": nn.Embedding.from_pretrained(torch.ones(20, 2)),
            "top": nn.Linear(2, 2),
        }
    )
    weight = model["user"].weight
    assert convert_embeddings(model.eval(), min_rows=20, optimizer=rows.SGD(lr=0.5)) is model
    bag, user = model["deep"][0], model["user"]
    assert isinstance(bag, EmbeddingBag)
    assert (bag.mode, bag.include_last_offset, bag.padding_id, bag.training) == ("max", True, 4, False)
    assert isinstance(user, Embedding)
    assert user.padding_id == 1
    [table] = user.tables
    assert (table.name, table.dim, table.optimizer) == ("user", 2, rows.SGD(lr=0.5))
    assert bag.tables[0].name == "deep.0"
    assert table.initial is not None
    assert torch.equal(table.initial, weight)
    assert [type(model[name]) for name in ("small", "own", "frozen")] == [nn.Embedding, Own, nn.Embedding]


def test_modules_that_share_a_weight_share_a_table_and_one_module_stays_one() -> None:
    model = nn.ModuleList([nn.Embedding(20, 2), nn.EmbeddingBag(20, 2)])
    model[1].weight = model[0].weight
    model.append(model[0])
    convert_embeddings(model, min_rows=10)
    assert model[0].tables == model[1].tables
    assert model[2] is model[0]


def test_a_weight_that_another_layer_uses_stays_with_it(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(20, 2), "output": nn.Linear(2, 20, bias=False)})
    model["output"].weight = model["embedding"].weight
    with caplog.at_level(logging.WARNING, "ps_worker"):
        convert_embeddings(model, min_rows=10)
    assert isinstance(model["embedding"], nn.Embedding)
    assert "'embedding' stays as it is" in caplog.text


def test_a_model_that_is_an_embedding_is_returned_as_a_table() -> None:
    module = convert_embeddings(nn.Embedding(20, 2), min_rows=10)
    assert isinstance(module, Embedding)
    assert module.tables[0].name == "embedding"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Embedding(20, 2, max_norm=1.0), "max_norm=1.0"),
        (nn.EmbeddingBag(20, 2, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
        (nn.Embedding(20, 2, dtype=torch.float64), "float64"),
    ],
)
def test_what_a_table_does_not_do_is_refused_by_name(module: nn.Module, said: str) -> None:
    model = nn.ModuleDict({"user": module})
    with pytest.raises(InvalidRequest, match=said) as error:
        convert_embeddings(model, min_rows=10)
    assert error.value.variable == "user"


def test_a_table_has_the_same_name_inside_a_compiled_module() -> None:
    inner = torch.compile(nn.ModuleDict({"users": nn.Embedding(20, 2)}), backend="eager")
    model = torch.compile(nn.Sequential(inner), backend="eager")
    convert_embeddings(model, min_rows=10)
    module = model.get_submodule("_orig_mod.0._orig_mod.users")
    assert isinstance(module, Embedding)
    assert module.tables[0].name == "0.users"
