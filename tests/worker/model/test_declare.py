"""What a torch-class, its arguments and a model are declared as, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import ConfigError, InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.optimizers import ELEMENTWISE, SHAPED
from ps_protocol.model.spec import Buffers, DType, Kind, NonFinite
from ps_worker.model.declare import Declaration, build_spec, named_arguments


def declare(source: object, torch_class: type = torch.optim.SGD, **arguments: object) -> Declaration:
    policies = {k: arguments.pop(k) for k in ("nonfinite", "buffers") if k in arguments}
    return build_spec(torch_class, source, {"lr": 0.1} | arguments, name="model", **policies)


def names(declaration: Declaration) -> list[str]:
    return [v.name for v in declaration.spec.variables]


def test_a_module_gives_its_parameters_and_persistent_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    spec = declare(model).spec
    assert {v.name for v in spec.variables} == set(model.state_dict())
    assert [v.kind for v in spec.variables] == [Kind.PARAMETER] * 4 + [Kind.BUFFER] * 3
    assert spec.variables[-1].dtype is DType.INT64
    assert spec.optimizer == "torch.optim.SGD"


def test_a_tied_parameter_is_declared_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    assert names(declare(model)) == ["a.weight"]


def test_a_frozen_parameter_is_declared_too() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert names(declare(model)) == ["weight", "bias"]


def test_local_buffers_are_not_declared() -> None:
    spec = declare(nn.BatchNorm1d(2), buffers="local").spec
    assert spec.buffers is Buffers.LOCAL
    assert [v.name for v in spec.variables] == ["weight", "bias"]


def test_bare_parameters_are_numbered_over_all_groups() -> None:
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    declaration = declare([{"params": [a, b]}, {"params": c, "lr": 0.5}])
    assert names(declaration) == ["param_0", "param_1", "param_2"]
    assert [v.group for v in declaration.spec.variables] == [0, 0, 1]
    assert [o["lr"] for o in declaration.spec.group_options] == [0.1, 0.5]


def test_named_parameters_keep_their_names() -> None:
    declaration = declare(nn.Linear(2, 2).named_parameters())
    assert names(declaration) == ["weight", "bias"]
    assert declaration.groups[0]["param_names"] == ["weight", "bias"]


def test_generators_and_groups_of_generators_are_accepted() -> None:
    model = nn.Linear(2, 2)
    assert names(declare(model.parameters())) == ["param_0", "param_1"]
    assert names(declare([{"params": model.parameters()}])) == ["param_0", "param_1"]


def test_options_hold_the_constructors_arguments_and_no_execution_hints() -> None:
    options = declare(nn.Linear(2, 2), torch.optim.AdamW, lr=torch.tensor(0.25), fused=True).spec.group_options[0]
    assert options["lr"] == 0.25
    assert options["betas"] == [0.9, 0.999]
    assert not {"fused", "foreach", "capturable", "params", "decoupled_weight_decay"} & set(options)


@pytest.mark.parametrize("qualified", sorted(ELEMENTWISE | SHAPED))
def test_every_supported_class_can_be_declared(qualified: str) -> None:
    torch_class = getattr(torch.optim, qualified.rsplit(".", 1)[1])
    spec = declare([nn.Parameter(torch.zeros(4, 4))], torch_class).spec
    assert spec.optimizer == qualified
    assert spec.unsplit is (qualified in SHAPED)


def test_declaring_adagrad_allocates_no_state() -> None:
    declaration = declare(nn.Linear(2, 2), torch.optim.Adagrad)
    assert declaration.state == {}
    assert all(p.device.type == "cpu" for p in declaration.bindings.parameters)


def test_two_workers_that_build_the_same_model_declare_equal_specs() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert declare(model).spec == declare(copy.deepcopy(model)).spec


def test_policies_are_read_from_their_names() -> None:
    spec = declare(nn.Linear(1, 1), nonfinite="skip", buffers="average").spec
    assert (spec.nonfinite, spec.buffers) == (NonFinite.SKIP, Buffers.AVERAGE)


def test_an_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="'refuse', 'skip', 'allow'"):
        declare(nn.Linear(1, 1), nonfinite="ignore")


def test_lbfgs_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedOptimizer, match="evaluates the loss several times"):
        declare(nn.Linear(1, 1), torch.optim.LBFGS)


def test_a_class_that_is_not_torchs_own_is_refused() -> None:
    class SGD(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedOptimizer, match="not an optimizer that shards run"):
        declare(nn.Linear(1, 1), SGD)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"speed": 3}, "speed"),
        ({"differentiable": True}, "autograd does not reach"),
        ({"weight_decay": object()}, "refuses these arguments"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UnsupportedOptimizer, match=text):
        declare(nn.Linear(1, 1), **arguments)


def test_an_option_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="'momentum' cannot be sent"):
        declare([{"params": [nn.Parameter(torch.zeros(1))], "momentum": torch.zeros(2)}])


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (nn.Parameter(torch.zeros(3, 4)[:, ::2]), "not dense"),
        (nn.Parameter(torch.zeros(3, 1).expand(3, 2)), "not dense"),
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "floating-point"),
        (nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False), "floating-point"),
        (torch.zeros(2, 2).to_sparse().requires_grad_(), "sparse"),
        (nn.Parameter(torch.zeros(2, device="meta")), "meta"),
        (nn.Parameter(torch.zeros(2)) * 2, "result of a computation"),
        (nn.parameter.UninitializedParameter(), "lazy"),
    ],
)
def test_a_parameter_that_shards_cannot_hold_is_named(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        declare([("good", nn.Parameter(torch.zeros(1))), ("wrong", tensor)])
    assert caught.value.variable == "wrong"


@pytest.mark.parametrize("empty", [[], nn.ReLU(), [{"params": []}]])
def test_a_model_without_parameters_is_refused(empty: object) -> None:
    with pytest.raises(InvalidRequest, match="no parameters"):
        declare(empty)


@pytest.mark.parametrize("source", [torch.zeros(2), [1.0], [{"lr": 0.1}], [("a", torch.zeros(1)), torch.zeros(1)]])
def test_what_is_not_parameters_is_refused(source: object) -> None:
    with pytest.raises(InvalidRequest):
        declare(source)


def test_parameters_that_share_memory_are_refused() -> None:
    a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    b.data = a.data[2:]
    with pytest.raises(InvalidRequest, match="share memory; the other is 'a'"):
        declare([("a", a), ("b", b)])


def test_a_name_may_not_stand_for_two_parameters() -> None:
    with pytest.raises(InvalidRequest, match="same name"):
        declare([("a", nn.Parameter(torch.zeros(1))), ("a", nn.Parameter(torch.zeros(1)))])


class Tagged(torch.Tensor):
    """As many libraries make them: behaves as a tensor, and is more than its memory."""


class DTensor(torch.Tensor):
    """Stands for torch.distributed's, whose memory is elsewhere."""


class FlatParameter(nn.Parameter):
    """Stands for FullyShardedDataParallel's."""


def flattened() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2))
    parameter._fsdp_flattened = True  # what FSDP1 leaves on the user's own parameters
    return parameter


@pytest.mark.parametrize(
    ("tensor", "text", "remedy"),
    [
        (nn.Parameter(torch.zeros(2).as_subclass(DTensor)), "'wrong' is a DTensor", "fully_shard"),
        (FlatParameter(torch.zeros(2)), "'wrong' belongs to FullyShardedDataParallel", "without the FSDP wrapper"),
        (flattened(), "'wrong' belongs to FullyShardedDataParallel", "without the FSDP wrapper"),
        (nn.Parameter(torch.zeros(2).as_subclass(Tagged)), "'wrong' is of a tensor subclass", "as_subclass"),
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "floating-point", "view_as_real"),
    ],
)
def test_what_other_libraries_make_of_a_parameter_is_recognised(tensor: Any, text: str, remedy: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        declare([("good", nn.Parameter(torch.zeros(1))), ("wrong", tensor)])
    assert remedy in caught.value.remedy


def test_a_subclass_of_parameter_that_behaves_as_one_is_taken() -> None:
    class Own(nn.Parameter):
        pass

    assert declare([("own", Own(torch.zeros(1)))]).spec.variables[0].name == "own"


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.uint16),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).as_subclass(Tagged),
    ],
)
def test_a_buffer_that_shards_cannot_hold_is_named_with_the_remedy(buffer: torch.Tensor) -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("wrong", buffer)
    with pytest.raises(InvalidRequest) as caught:
        declare(module)
    assert caught.value.variable == "wrong"
    assert 'buffers="local"' in caught.value.remedy
    assert build_spec(torch.optim.SGD, module, {}, name="model", buffers="local").spec.variables


def test_arguments_without_names_are_torch_s_own_in_their_order() -> None:
    assert named_arguments(torch.optim.SGD, (0.1, 0.9), {"nesterov": True}) == {
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
    }
    assert named_arguments(torch.optim.Adam, (), {"lr": 0.1}) == {"lr": 0.1}


@pytest.mark.parametrize(
    ("positional", "arguments", "text"),
    [((0.1,), {"lr": 0.2}, "'lr' twice"), ((0.1,) * 9, {}, "too many arguments")],
)
def test_arguments_that_torch_would_not_take_are_refused(
    positional: tuple[float, ...], arguments: dict[str, float], text: str
) -> None:
    with pytest.raises(UnsupportedOptimizer, match=text) as caught:
        named_arguments(torch.optim.SGD, positional, arguments)
    assert "lr=0.1" in caught.value.remedy


def grouped(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]


def test_with_module_groups_have_its_buffers_and_names() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    extra = nn.Parameter(torch.zeros(1))
    groups = [*grouped(module), {"params": [extra]}]
    spec = build_spec(torch.optim.SGD, groups, {"lr": 0.1}, name="model", module=module).spec
    assert [v.name for v in spec.variables if v.kind is Kind.PARAMETER] == [
        *(name for name, _ in module.named_parameters()),
        "param_4",
    ]
    assert [v.name for v in spec.variables if v.kind is Kind.BUFFER] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    local = build_spec(torch.optim.SGD, groups, {}, name="model", module=module, buffers="local").spec
    assert all(v.kind is Kind.PARAMETER for v in local.variables)


def test_names_that_the_user_gave_stay_with_module() -> None:
    module = nn.Linear(1, 1)
    spec = build_spec(torch.optim.SGD, [("mine", module.weight)], {}, name="model", module=module).spec
    assert [v.name for v in spec.variables] == ["mine"]


@pytest.mark.parametrize("other", [nn.Linear(1, 1), "model"])
def test_module_is_for_parameters_and_groups(other: object) -> None:
    source = nn.Linear(1, 1) if isinstance(other, nn.Module) else [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match="module= names the module"):
        build_spec(torch.optim.SGD, source, {}, name="model", module=other)


def test_the_model_itself_may_be_named_as_module() -> None:
    model = nn.Linear(1, 1)
    assert build_spec(torch.optim.SGD, model, {}, name="model", module=model).spec.variables


def test_a_parameter_of_another_optimizer_is_refused_by_name() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(InvalidRequest, match="'bias' belongs to the optimizer of model 'first' already"):
        build_spec(torch.optim.SGD, module, {}, name="second", held={id(module.bias): "first"})


@pytest.mark.parametrize("where", ["outside", "inside", "both", "groups", "named", "module"])
def test_names_are_the_same_with_and_without_compile(where: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    expected = names(declare(plain))
    model: nn.Module = copy.deepcopy(plain)
    if where != "outside":
        model[1] = torch.compile(model[1], backend="eager")
    if where in ("outside", "both"):
        model = torch.compile(model, backend="eager")
    arguments: dict[str, Any] = {}
    source: object = model
    if where in ("groups", "named"):
        source = [{"params": list(model.named_parameters() if where == "named" else model.parameters())}]
    if where in ("groups", "named", "module"):
        arguments["module"] = model
        source = model.parameters() if where == "module" else source
    declared = build_spec(torch.optim.SGD, source, {"lr": 0.1}, name="model", **arguments)
    assert names(declared) == expected
    assert "1.1.running_mean" in expected


def test_a_name_that_differs_by_compile_alone_is_there_twice() -> None:
    named = [("a.weight", nn.Parameter(torch.zeros(2))), ("_orig_mod.a.weight", nn.Parameter(torch.zeros(2)))]
    with pytest.raises(InvalidRequest, match="same name") as caught:
        declare(named)
    assert caught.value.variable == "a.weight"
