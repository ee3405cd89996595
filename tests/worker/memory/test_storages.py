"""Each parameter has a storage of its own, in its user's layout: what saves a part of a model saves that part."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from ps_protocol.errors import InvalidRequest
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import GradientBuffers
from tests.worker.fakes import place


def flatten(module: nn.Module, shards: int = 2) -> tuple[FlatModel, GradientBuffers]:
    declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
    model = FlatModel(declaration.bindings, place(declaration.spec, shards))
    return model, GradientBuffers(model.plan, declaration.bindings)


def saved_bytes(thing: object) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


class Net(nn.Module):
    """A large base and small parts of it that users save alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 513)
        self.head = nn.Linear(513, 3)
        self.lora_a = nn.Parameter(torch.randn(4, 512))
        self.lora_b = nn.Parameter(torch.zeros(513, 4))


def test_saving_a_part_of_a_model_saves_that_part() -> None:
    module = Net()
    apart = {name: value.clone() for name, value in module.state_dict().items()}
    flatten(module)
    head = {name: value for name, value in module.state_dict().items() if name.startswith("head")}
    adapter = {name: value for name, value in module.state_dict().items() if "lora" in name}
    for part in (head, adapter):
        assert saved_bytes(part) == saved_bytes({name: apart[name] for name in part})
    assert saved_bytes(module.head.weight) < 10_000
    assert saved_bytes(dict(module.state_dict())) == saved_bytes(apart)


def test_safetensors_save_a_whole_model(tmp_path: Path) -> None:
    module = Net()
    flatten(module)
    save_model(module, str(tmp_path / "model.safetensors"))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())


def shared_storages(module: nn.Module) -> list[set[str]]:
    """As Hugging Face's and Accelerate's savers find tied parameters: by device, storage and its size."""
    found: dict[object, set[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        storage = value.untyped_storage()
        found.setdefault((value.device, storage.data_ptr(), storage.nbytes()), set()).add(name)
    return [names for names in found.values() if len(names) > 1]


def test_savers_that_look_for_shared_storages_find_those_that_were_shared_before() -> None:
    module = Net()
    module.tied = nn.Linear(513, 3)
    module.tied.weight = module.head.weight
    flatten(module)
    assert shared_storages(module) == [{"head.weight", "tied.weight"}]


def test_a_copy_of_a_model_has_memory_of_its_own() -> None:
    module = Net()
    flatten(module)
    other = copy.deepcopy(module)
    before = module.head.weight.detach().clone()
    with torch.no_grad():
        other.head.weight.add_(1)
    assert torch.equal(module.head.weight, before)
    assert other.head.weight.untyped_storage().nbytes() == other.head.weight.nbytes


@pytest.mark.parametrize("odd", [nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0, 3))])
def test_scalars_and_empty_parameters_have_storages_of_their_own_too(odd: nn.Parameter) -> None:
    module = nn.ParameterList([odd, nn.Parameter(torch.randn(5))])
    flatten(module)
    assert [p.untyped_storage().nbytes() for p in module] == [odd.nbytes, 20]


def dense_models() -> Sequence[nn.Module]:
    images = nn.Sequential(nn.Conv2d(3, 9, 3), nn.Linear(4, 4)).to(memory_format=torch.channels_last)
    turned = nn.ParameterList([nn.Parameter(torch.randn(9, 5).t()), nn.Parameter(torch.randn(3))])
    return images, turned


@pytest.mark.parametrize("module", dense_models())
@pytest.mark.parametrize("shards", [1, 3])
def test_dense_layouts_are_kept_and_sent_in_the_order_of_the_axes(module: nn.Module, shards: int) -> None:
    module = copy.deepcopy(module)
    strides = [p.stride() for p in module.parameters()]
    before = [p.detach().clone() for p in module.parameters()]
    model, gradients = flatten(module, shards)
    model.publish_parameters()
    assert [p.stride() for p in module.parameters()] == strides
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    # What a push carries, received as parameters, is the gradients.
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    gradients.collect()
    for shard in range(shards):
        targets = model.host_tensors(model.plan.ranges(shard))
        data = b"".join(gradients.pieces(shard, model.plan.layouts[shard].ranges()))
        for target in targets:
            target.copy_(torch.frombuffer(bytearray(data[: len(target)]), dtype=torch.uint8))
            data = data[len(target) :]
    model.publish_parameters()
    assert all(torch.equal(p, p.grad) for p in module.parameters())
    assert [p.stride() for p in module.parameters()] == strides
    with torch.no_grad():
        next(module.parameters()).fill_(3)
    model.collect_values()
    model.publish_parameters()
    assert bool((next(module.parameters()) == 3).all())


def flatten_as_cudnn(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """As ``RNNBase.flatten_parameters`` does on a GPU: one new buffer, and every weight set to a part of it."""
    buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
    begin = 0
    for p in parameters:
        p.data = buffer[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()
    return buffer


def test_weights_that_an_rnn_flattens_stay_flat_and_are_the_clusters() -> None:
    module = nn.LSTM(3, 5)
    model, gradients = flatten(module, shards=2)
    model.publish_parameters()
    parameters = list(module.parameters())
    buffer = flatten_as_cudnn(parameters)
    assert model.written() == ()
    model.parameters.host.zero_()
    model.publish_parameters()
    assert bool((buffer == 0).all())
    assert parameters[1].data_ptr() == buffer.data_ptr() + parameters[0].nbytes
    module(torch.ones(2, 1, 3))[0].sum().backward()
    assert gradients.collect() == ()
    flatten_as_cudnn(parameters)
    assert model.written() == ()


@pytest.mark.parametrize("doubled", [False, True])
def test_storages_that_move_into_shared_memory_stay_there_and_are_the_clusters(doubled: bool) -> None:
    module = nn.Linear(300, 200)
    declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
    model = FlatModel(declaration.bindings, place(declaration.spec, 1), doubled=doubled)
    model.publish_parameters()
    before = [p.detach().clone() for p in module.parameters()]
    module.share_memory()
    assert model.written() == ()
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    for piece in model.pieces([(0, model.plan.total_bytes)]):
        piece[:] = bytes(len(piece))
    model.publish_parameters()
    assert all(p.is_shared() and not p.any() for p in module.parameters())
    module.weight.data.add_(1)
    assert model.written() == (0,)
    model.collect_values()
    assert any(any(piece) for piece in model.pieces([(0, model.plan.total_bytes)]))


def test_a_parameter_that_changes_its_shape_is_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    model, _ = flatten(module)
    module.weight.data = torch.zeros(3, 2)
    with pytest.raises(InvalidRequest, match="moved or converted") as caught:
        model.check_in_place()
    assert caught.value.variable == "weight"
