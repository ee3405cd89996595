"""What lies on disk is what other programs expect: safetensors, an index, nothing of torch-ps needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin
from ps_server.checkpoint.file_plan import FileForm, TensorForm, ValueFiles, model_folder
from ps_server.state.region import torch_dtype
from tests.support.length import examples

from .support import Job, raw, rules, same_bits, shard_map_of, small_spec, spec_of, specs


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face loaders do it: the index names the files, the files hold the tensors."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_safetensors_alone_reads_every_variable_whole_through_the_index(tmp_path: Path, shards: int) -> None:
    job = Job.of(shard_map_of(small_spec(), shards), seed=1).train([1])
    folder = job.save(tmp_path).folder / "model"
    assert same_bits(loaded(folder), job.values())
    assert sorted(p.name for p in folder.glob("model-*")) == [
        f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)
    ]


def test_optimizer_state_is_safetensors_too(tmp_path: Path) -> None:
    spec = spec_of("Adam", [Variable("table", (40, 3), DType.FLOAT32), Variable("w", (3,), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 2), seed=1).train([1])
    folder = job.save(tmp_path).folder / "model"
    names = set()
    for path in folder.glob("optimizer-*-of-00002.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    middle = max(s.row_begin for s in job.shard_map.slices)
    parts = ["w", f"table[0:{middle}]", f"table[{middle}:40]"]
    states = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert names == {f"{part}/{state}" for part in parts for state in states}


def test_a_job_of_several_models_has_a_folder_for_each(tmp_path: Path) -> None:
    jobs = [Job.of(shard_map_of(small_spec(name=name), 2), seed=n) for n, name in enumerate(["actor", "critic/../x"])]
    folder = begin(tmp_path)
    parts = [part for job in jobs for part in job.parts(folder)]
    commit(folder, [job.shard_map for job in jobs], parts, {}, 0.0)
    assert sorted(p.name for p in folder.iterdir()) == ["actor", "critic%2F..%2Fx", "manifest.json"]
    for job, name in zip(jobs, ["actor", "critic%2F..%2Fx"], strict=True):
        assert same_bits(loaded(folder / name), job.values())


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_every_model_name_gives_a_folder_of_its_own_that_stays_inside(one: str, other: str) -> None:
    folder = model_folder(one)
    assert Path("base", folder).resolve().parent == Path("base").resolve()
    assert 0 < len(folder.encode()) <= 255
    assert (model_folder(one) == model_folder(other)) == (one == other)


@pytest.mark.parametrize("name", [".", "..", "/", "a/b", "manifest.json", "", "\0"])
def test_names_that_mean_something_to_a_path_mean_nothing_here(name: str) -> None:
    assert model_folder(name) not in (".", "..", "", "manifest.json")
    assert not {"/", "\0"} & set(model_folder(name))


@examples(200)
@given(
    st.lists(st.tuples(st.text(max_size=8), st.sampled_from(list(DType)), st.sampled_from([(), (3,), (0, 2), (5, 7)])))
)
def test_a_file_form_is_what_safetensors_reads(members: list[tuple[str, DType, tuple[int, ...]]]) -> None:
    forms = [TensorForm(name, dtype, shape) for name, dtype, shape in {m[0]: m for m in members}.values()]
    form = FileForm.of("x", forms)
    data = bytearray(form.head.ljust(form.size_bytes, b"\0"))
    expected = {}
    for tensor in forms:
        value = torch.ones(tensor.shape, dtype=torch_dtype(tensor.dtype))
        expected[tensor.name] = raw(value)
        assert form.at[tensor.name] % tensor.dtype.itemsize == 0
        data[form.at[tensor.name] : form.at[tensor.name] + tensor.nbytes] = expected[tensor.name][2]
    assert {name: raw(value) for name, value in load(bytes(data)).items()} == expected


@pytest.mark.parametrize("names", [["__metadata__"], ["a", "a"]])
def test_names_that_safetensors_cannot_hold_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=f"variable: {names[0]}; "):
        FileForm.of("x", [TensorForm(name, DType.FLOAT32, ()) for name in names])


@given(specs(), st.integers(1, 4), rules())
def test_the_plan_gives_every_byte_of_a_file_to_one_slice(spec: ModelSpec, shards: int, rule: object) -> None:
    shard_map = shard_map_of(spec, shards, rule)  # type: ignore[arg-type]
    plan = ValueFiles.of(shard_map)
    taken: dict[str, list[tuple[int, int]]] = {form.name: [(0, len(form.head))] for form in plan.files.values()}
    for piece in shard_map.slices:
        form, at = plan.place(shard_map, piece)
        nbytes = (piece.row_end - piece.row_begin) * spec.variables[piece.variable].row_bytes
        taken[form.name] += [(at, at + nbytes)] if nbytes else []
    for form in plan.files.values():
        ranges = sorted(taken[form.name])
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == form.size_bytes
