"""Embeddings on tables give what torch's own give: outputs, gradients, for any ids, bags, weights and padding."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ps_protocol.errors import InvalidRequest
from ps_worker.tables import Embedding, EmbeddingBag, EmbeddingBags, Table
from ps_worker.tables.batch import RowRequest, distinct
from ps_worker.tables.converted import convert_embeddings
from tests.support.length import examples
from tests.worker.devices import REAL
from tests.worker.tables.row_source import DenseRows, bind, dense_gradients

DIM = 5
IDS = [0, 1, -1, 7, 2**63 - 1, -(2**63), 10**12, 123456789]
PLACES = st.integers(0, len(IDS) - 1)
SEEDS = st.integers(0, 2**16)


def weight(seed: int, rows: int = len(IDS)) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))


def with_values(places: torch.Tensor) -> torch.Tensor:
    """The ids that ``places`` stand for."""
    return torch.tensor(IDS)[places.reshape(-1)].reshape(places.shape)


def assert_same_gradients(outputs: torch.Tensor, expected: torch.Tensor, seed: int) -> None:
    """Outputs are equal; then each is weighted alike and differentiated."""
    torch.testing.assert_close(outputs, expected)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed + 1)).to(expected.device)
    (outputs * factors).sum().backward()
    (expected * factors).sum().backward()


bags = st.lists(st.lists(PLACES, max_size=6), max_size=6)


@examples(60)
@given(
    bags,
    st.sampled_from(["sum", "mean", "max"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int64, torch.int32]),
    SEEDS,
)
def test_a_bag_is_torch_s_bag(
    bags: list[list[int]], mode: str, weighted: bool, padded: bool, last: bool, dtype: torch.dtype, seed: int
) -> None:
    padding = 3 if padded else None
    places = torch.tensor([place for bag in bags for place in bag], dtype=torch.int64)
    ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    offsets = (ends if last else ends[:-1]).to(dtype)
    reference = nn.EmbeddingBag(
        len(IDS), DIM, mode=mode, padding_idx=padding, include_last_offset=True, _weight=weight(seed)
    )
    module = EmbeddingBag(DIM, name="t", mode=mode, include_last_offset=last, padding_id=IDS[3] if padded else None)
    source = DenseRows([weight(seed)], IDS)
    bound = bind([module], source)
    weights = [None, None]
    if weighted and mode == "sum":
        weights = [torch.rand(len(places)).requires_grad_()]
        weights.append(weights[0].detach().clone().requires_grad_())
    found = module(with_values(places), offsets, weights[0])
    expected = reference(places, ends, weights[1])
    assert_same_gradients(found, expected, seed)
    assert reference.weight.grad is not None
    torch.testing.assert_close(dense_gradients(bound, source)[0], reference.weight.grad)
    if weights[0] is not None and len(places):
        torch.testing.assert_close(weights[0].grad, weights[1].grad)


@examples(30)
@given(
    st.integers(0, 4).flatmap(lambda width: st.lists(st.lists(PLACES, min_size=width, max_size=width), max_size=5)),
    st.sampled_from(["sum", "mean", "max"]),
    SEEDS,
)
def test_each_row_of_2d_ids_is_a_bag(rows: list[list[int]], mode: str, seed: int) -> None:
    width = len(rows[0]) if rows else 3
    places = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
    module, source = EmbeddingBag(DIM, name="t", mode=mode), DenseRows([weight(seed)], IDS)
    bound = bind([module], source)
    reference = nn.EmbeddingBag(len(IDS), DIM, mode=mode, _weight=weight(seed))
    expected = reference(places.reshape(-1), torch.arange(len(rows)) * width)
    assert_same_gradients(module(with_values(places)), expected, seed)
    assert reference.weight.grad is not None
    torch.testing.assert_close(dense_gradients(bound, source)[0], reference.weight.grad)


@examples(30)
@given(st.lists(PLACES, max_size=12), st.booleans(), SEEDS)
def test_an_embedding_is_torch_s_embedding_in_any_shape(places: list[int], padded: bool, seed: int) -> None:
    shaped = torch.tensor(places, dtype=torch.int64)
    shaped = shaped.reshape(2, -1) if len(places) % 2 == 0 else shaped
    own = weight(seed)
    if padded:
        own[4] = 0  # as nn.Embedding begins with it
    module = Embedding(DIM, name="t", padding_id=IDS[4] if padded else None)
    source = DenseRows([own.clone()], IDS)
    bound = bind([module], source)
    reference = nn.Embedding(len(IDS), DIM, padding_idx=4 if padded else None, _weight=own)
    assert_same_gradients(module(with_values(shaped)), reference(shaped), seed)
    assert reference.weight.grad is not None
    torch.testing.assert_close(dense_gradients(bound, source)[0], reference.weight.grad)
    assert all(IDS[4] not in ids for [(_, ids)] in source.asked) or not padded


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_a_module_has_torch_s_names(kind: type[Embedding | EmbeddingBag]) -> None:
    module = kind(DIM, name="t", padding_id=3)
    bind([module], DenseRows([weight(1)], IDS))
    named = {"input": torch.tensor([[IDS[1], IDS[2]]])}
    torch.testing.assert_close(module(**named), module(named["input"]))
    assert (module.embedding_dim, module.padding_idx) == (DIM, 3)
    if kind is EmbeddingBag:
        more = {"input": torch.tensor([IDS[1]]), "offsets": torch.tensor([0]), "per_sample_weights": None}
        assert module(**more).shape == (1, DIM)


@pytest.mark.parametrize(("name", "words"), [("weight", "on the shards"), ("num_embeddings", "any id")])
def test_what_a_table_has_not_is_explained_and_looks_absent(name: str, words: str) -> None:
    module = Embedding(DIM, name="t")
    with pytest.raises(InvalidRequest, match=words) as refused:
        getattr(module, name)
    assert refused.value.variable == "t"
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(AttributeError, match="colour"):
        _ = module.colour


def test_several_features_have_no_common_dim() -> None:
    module = EmbeddingBags({"a": Table(2, name="a"), "b": Table(3, name="b")})
    with pytest.raises(InvalidRequest, match="a dim each"):
        _ = module.embedding_dim


def test_a_converted_embedding_knows_how_many_it_had() -> None:
    module = convert_embeddings(nn.Embedding(100, DIM), min_rows=10)
    assert module.num_embeddings == 100


@examples(30)
@given(bags, bags, bags, SEEDS)
def test_features_of_several_tables_are_asked_for_at_once_and_may_share_one(
    one: list[list[int]], two: list[list[int]], three: list[list[int]], seed: int
) -> None:
    shared, own = Table(DIM, name="shared"), Table(DIM, name="own")
    module = EmbeddingBags({"one": (shared, "sum"), "two": own, "three": (shared, "max")}, mode="mean")
    source = DenseRows([weight(seed), weight(seed + 1)], IDS)
    bound = bind([module], source)
    references = {
        name: nn.EmbeddingBag(len(IDS), DIM, mode=mode, include_last_offset=True, _weight=source.weights[table].clone())
        for name, (mode, table) in {"one": ("sum", 0), "two": ("mean", 1), "three": ("max", 0)}.items()
    }
    places = {
        name: torch.tensor([p for bag in given for p in bag], dtype=torch.int64)
        for name, given in (("three", three), ("one", one), ("two", two))
    }
    ends = {
        name: torch.tensor([0, *map(len, given)]).cumsum(0)
        for name, given in (("one", one), ("two", two), ("three", three))
    }
    found = module(
        {name: with_values(each) for name, each in places.items()}, {name: end[:-1] for name, end in ends.items()}
    )
    assert list(found) == ["one", "two", "three"]
    for number, name in enumerate(found):
        assert_same_gradients(found[name], references[name](places[name], ends[name]), seed + number)
    shared_gradient = references["one"].weight.grad + references["three"].weight.grad
    torch.testing.assert_close(dense_gradients(bound, source)[0], shared_gradient)
    torch.testing.assert_close(dense_gradients(bound, source)[1], references["two"].weight.grad)
    assert len(source.lookups) == 1
    assert all(len(set(ids)) == len(ids) for _, ids in source.asked[0])


def test_gradients_of_several_forward_passes_add_up() -> None:
    one, two = EmbeddingBag(DIM, name="t", mode="sum"), Embedding(DIM, name="t")
    source = DenseRows([weight(0)], IDS)
    bound = bind([one, two], source)
    for scale in (1.0, 10.0):
        (one(torch.tensor([[0, 1]])).sum() * scale).backward()
    (two(torch.tensor([1, 7])).sum() * 100).backward()
    assert dense_gradients(bound, source)[0][:, 0].tolist() == [11, 111, 0, 100, 0, 0, 0, 0]
    bound.clear()
    assert bound.collect().tables == []


def test_a_pass_without_backward_leaves_nothing_and_one_without_grad_asks_for_the_newest() -> None:
    module, source = Embedding(DIM, name="t"), DenseRows([weight(0)], IDS)
    bound = bind([module], source)
    module(torch.tensor([1]))
    with torch.no_grad():
        assert not module(torch.tensor([1])).requires_grad
    assert bound.collect().tables == []
    assert [lookup.now for lookup in source.lookups] == [False, True]
    assert bound.gradients[0].tensors == []


def test_what_an_embedding_returns_may_be_written_to() -> None:
    source = DenseRows([weight(1)], IDS)
    module = Embedding(DIM, name="t")
    bound = bind([module], source)
    ids = torch.tensor([IDS[3], IDS[1], IDS[6], IDS[0]]).reshape(2, 2)
    expected = weight(1)[[3, 1, 6, 0]].reshape(2, 2, DIM)

    bound.prepare([module.request(ids)], 0)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(module(ids), expected)
            module(ids).mul_(0)
    assert len(source.lookups) == 1
    found = module(ids)
    torch.testing.assert_close(found.add_(1.0), expected + 1)
    found.mul_(found.detach().clone()).sum().backward()
    [gradients] = dense_gradients(bound, source)
    torch.testing.assert_close(gradients[[3, 1, 6, 0]].reshape(2, 2, DIM), expected + 1)
    [rows] = bound.gradients[0].tensors
    assert torch.equal(rows.detach(), expected.reshape(4, DIM))


def test_a_kept_graph_adds_its_gradients_to_the_first() -> None:
    module, source = Embedding(DIM, name="t"), DenseRows([weight(0)], IDS)
    bound = bind([module], source)
    loss = module(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert dense_gradients(bound, source)[0][1].tolist() == [2.0] * DIM
    assert len(bound.gradients[0].tensors) == 1


def test_a_table_that_took_part_without_a_row_is_named_all_the_same() -> None:
    module, source = EmbeddingBag(DIM, name="t"), DenseRows([weight(0)], IDS)
    bound = bind([module], source)
    module(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])).sum().backward()
    [only] = bound.collect().tables
    assert (only.table, len(only.ids), only.gradients.shape) == (0, 0, (0, DIM))


def test_an_embedding_before_its_rows_are_anywhere_says_what_to_do() -> None:
    module = Embedding(DIM, name="t")
    with pytest.raises(InvalidRequest, match=r"cluster.optimizer"):
        module(torch.tensor([1]))


def test_copies_and_pickles_have_the_settings_alone() -> None:
    model = nn.ModuleList([Embedding(DIM, name="t"), EmbeddingBag(DIM, name="u")])
    bind([model], DenseRows([weight(0), weight(1)], IDS))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied[0].tables[0].bound is None
        assert copied[0].tables[0].spec(0) == model[0].tables[0].spec(0)
    assert model[0].tables[0].bound is not None


def test_modules_have_no_parameters_and_an_empty_state() -> None:
    module = EmbeddingBags({"f": Table(DIM, name="t")})
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    assert "f: Table(5, name='t'" in repr(module)


@pytest.mark.parametrize("padding", [None, IDS[1], 55])
def test_each_id_is_asked_for_once_and_the_padding_not_at_all(padding: int | None) -> None:
    ids = with_values(torch.tensor([[3, 1, 3], [0, 1, 5]]))
    found = distinct(RowRequest(Table(DIM, name="t"), (ids, ids[:, :1]), padding))
    assert found.ids.tolist() == [IDS[place] for place in (3, 1, 0, 5) if IDS[place] != padding]
    rows = torch.tensor([*([padding] if padding is not None else []), *found.ids.tolist()])
    assert rows[found.places].tolist() == [*ids.reshape(-1).tolist(), *ids[:, 0].tolist()]
    assert found.padded == (padding is not None)


@pytest.mark.parametrize("padding", [None, 7, 55])
def test_on_a_device_too_the_padding_gets_the_first_row(padding: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_worker.tables.batch._HOST", torch.device("meta"))
    ids = torch.tensor([9, 7, 9, 3])
    found = distinct(RowRequest(Table(DIM, name="t"), (ids,), padding))
    rows = torch.tensor([*([padding] if padding is not None else []), *found.ids.tolist()])
    assert rows[found.places].tolist() == ids.tolist()
    assert padding not in found.ids.tolist()


@pytest.mark.parametrize("devices", REAL[:1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_on_a_gpu_give_rows_there_and_their_gradients_come_back(devices: tuple[torch.device], mode: str) -> None:
    module, source = EmbeddingBag(DIM, name="t", mode=mode, padding_id=IDS[2]), DenseRows([weight(0)], IDS)
    bound = bind([module], source)
    reference = nn.EmbeddingBag(len(IDS), DIM, mode=mode, padding_idx=2, _weight=weight(0)).to(devices[0])
    places = torch.tensor([[3, 2, 3], [0, 1, 5]])
    assert_same_gradients(module(with_values(places).to(devices[0])), reference(places.to(devices[0])), 1)
    assert reference.weight.grad is not None
    torch.testing.assert_close(dense_gradients(bound, source)[0], reference.weight.grad.cpu())
