"""Versions of weights in directories are whole or not there; a server that reads the format has each bit of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest, StorageFull
from ps_protocol.model.spec import DType
from ps_server.checkpoint import weight_directory
from ps_server.checkpoint.file_plan import TensorForm
from ps_server.checkpoint.weight_directory import Origin, WeightDirectory, files_beside
from tests.support.seeds import drawn_seed

from .faults import Unsynced, counted, dies_at, full_at, growing, watched
from .weight_reader import Server

FORMS = (
    TensorForm("layer.weight", DType.BFLOAT16, (20, 24)),
    TensorForm("layer.bias", DType.FLOAT32, (40,)),
    TensorForm("format", DType.FLOAT64, (3, 5)),
    TensorForm("steps", DType.INT64, ()),
    TensorForm("empty", DType.FLOAT32, (0, 7)),
    TensorForm("mask", DType.BOOL, (9,)),
)
_CODES = {"BF16": DType.BFLOAT16, "F32": DType.FLOAT32, "F64": DType.FLOAT64, "I64": DType.INT64, "BOOL": DType.BOOL}

Values = Mapping[str, memoryview]


class Job:
    """Makes version after version of the same tensors: a few bytes change, NaN payloads among them, or all."""

    def __init__(self, forms: tuple[TensorForm, ...] = FORMS, share: float = 0.004) -> None:
        self.random = np.random.default_rng(drawn_seed())
        self.forms = forms
        self.share = share
        self.number = 0
        self._state = {form.name: self._any(form) for form in forms}
        #: By number.
        self.versions: dict[int, Values] = {}

    def next(self) -> tuple[int, tuple[TensorForm, ...], Values]:
        self.number += 1
        for form in self.forms:
            bytes_ = self._state[form.name].copy()
            chosen = self.random.random(len(bytes_)) < self.share
            bytes_[chosen] = self._any(form)[chosen]
            self._state[form.name] = bytes_
        self.versions[self.number] = {name: state.data for name, state in self._state.items()}
        return self.number, self.forms, self.versions[self.number]

    def skip(self) -> None:
        self.next()

    def _any(self, form: TensorForm) -> np.ndarray:
        return self.random.integers(0, 2 if form.dtype is DType.BOOL else 256, form.nbytes, dtype=np.uint8)

    def assert_served(self, server: Server) -> None:
        assert set(server.tensors) == {form.name for form in self.forms}
        for form in self.forms:
            code, shape, data = server.tensors[form.name]
            assert (_CODES[code], shape) == (form.dtype, form.shape)
            assert data == self.versions[server.version][form.name]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Nothing here loses power: what is synced is looked at, and need not be on the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(directory: WeightDirectory, job: Job, versions: int = 1) -> list[bool]:
    """Write so many; whether each is full."""
    return [directory.write(*job.next()).base is None for _ in range(versions)]


def followers(path: Path, job: Job) -> None:
    """Each version that is there, and the one that is pointed at, read by a server that begins with it."""
    numbers = [int(each.name[-6:]) for each in sorted(path.glob("weight_v*"))]
    for target in (*numbers, None):
        server = Server()
        server.pull(path, target)
        assert server.version == target or target is None
        job.assert_served(server)


def test_a_server_follows_deltas_and_every_so_many_versions_a_full_one(tmp_path):
    job, server = Job(), Server()
    with WeightDirectory(tmp_path / "made" / "here", anchor_every=4) as directory:
        for number in range(1, 11):
            written = directory.write(*job.next())
            assert written.number == directory.newest == number
            assert written.file_bytes < written.full_bytes or written.base is None
            server.pull(directory.path)
            job.assert_served(server)
        assert [number for number, full in directory.versions.items() if full] == [1, 5, 9]
    assert server.applied == [f"{'full' if number in (1, 5, 9) else 'delta'} {number}" for number in range(1, 11)]
    followers(directory.path, job)
    late = Server()
    late.pull(directory.path, 2)
    late.pull(directory.path)
    assert late.applied == ["full 1", "delta 2", "full 9", "delta 10"]
    assert (directory.path / "latest").read_text() == "weight_v000010"


@pytest.mark.parametrize(("share", "encoding"), [(0.004, "overwrite"), (0.3, "xor"), (0.0, "overwrite")])
def test_a_delta_of_many_changes_is_written_as_the_difference_of_all_bytes(tmp_path, share, encoding):
    job = Job(share=share)
    with WeightDirectory(tmp_path) as directory:
        assert write(directory, job, 2) == [True, False]
    index = json.loads((tmp_path / "weight_v000002" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["delta_encoding"] == encoding
    assert (share == 0.0) == (index["weight_map"] == {})
    followers(tmp_path, job)


def test_a_tensor_with_more_bytes_than_a_position_can_count_has_no_positions(tmp_path):
    job = Job()
    with mock.patch.object(weight_directory, "_POSITIONS", 900), WeightDirectory(tmp_path) as directory:
        assert write(directory, job, 2) == [True, False]
    index = json.loads((tmp_path / "weight_v000002" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["delta_encoding"] == "xor"
    followers(tmp_path, job)


def test_positions_beyond_a_block_are_those_in_the_tensor(tmp_path):
    form = TensorForm("large", DType.BFLOAT16, (3 * weight_directory._BLOCK_BYTES // 2 + 5,))
    old = np.zeros(form.nbytes, np.uint8)
    new = old.copy()
    places = [0, weight_directory._BLOCK_BYTES - 1, weight_directory._BLOCK_BYTES, form.nbytes - 1]
    new[places] = [1, 2, 3, 4]
    with WeightDirectory(tmp_path) as directory:
        directory.write(1, [form], {"large": old.data})
        assert directory.write(2, [form], {"large": new.data}).changed_bytes == 4
    server = Server()
    server.pull(tmp_path)
    assert server.tensors["large"][2] == new.tobytes()


def test_what_changed_everywhere_is_written_whole(tmp_path):
    job = Job((TensorForm("noise", DType.FLOAT32, (1000,)),), share=1.0)
    with WeightDirectory(tmp_path) as directory:
        assert write(directory, job, 3) == [True, True, True]
    followers(tmp_path, job)


def test_a_version_behind_one_that_is_missing_or_of_other_shapes_is_full(tmp_path):
    job = Job()
    with WeightDirectory(tmp_path) as directory:
        assert write(directory, job, 2) == [True, False]
        job.skip()
        assert write(directory, job, 2) == [True, False]
        other = Job((TensorForm("layer.weight", DType.BFLOAT16, (24, 20)),))
        number, forms, values = other.next()
        assert directory.write(6, forms, values).base is None
    server = Server()
    server.pull(tmp_path, 5)
    job.assert_served(server)
    server.pull(tmp_path)
    assert server.applied == ["full 4", "delta 5", "full 6"]
    assert server.tensors["layer.weight"][1] == (24, 20)
    assert number == 1


def test_numbers_with_more_than_six_digits_go_on(tmp_path):
    job, server = Job(), Server()
    job.number = 999_998
    with WeightDirectory(tmp_path) as directory:
        assert write(directory, job, 3) == [True, False, False]
    server.pull(tmp_path)
    job.assert_served(server)
    assert server.version == 1_000_001
    with WeightDirectory(tmp_path, keep=1, anchor_every=4) as directory:
        assert directory.newest == 1_000_001
        assert write(directory, job, 2) == [False, True]
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "weight_v1000003"}


@pytest.mark.parametrize("share", [0.004, 0.3])
def test_a_writer_that_was_started_again_goes_on_where_it_was(tmp_path, share):
    job, server = Job(share=share), Server()
    found = []
    for _ in range(4):
        with WeightDirectory(tmp_path, anchor_every=5, max_file_bytes=900) as directory:
            assert directory.newest == job.number
            found += write(directory, job, 3)
        server.pull(tmp_path)
        job.assert_served(server)
    assert found == [number % 5 == 0 for number in range(12)]
    followers(tmp_path, job)


def test_a_writer_goes_on_with_a_full_version_where_what_it_finds_is_damaged_or_of_another_dtype(tmp_path):
    def begun(name: str) -> Job:
        job = Job()
        with WeightDirectory(tmp_path / name) as directory:
            assert write(directory, job, 3) == [True, False, False]
        return job

    job = begun("whole")
    with WeightDirectory(tmp_path / "whole") as directory:
        number, _, values = job.next()
        other = [TensorForm(form.name, DType.UINT8, (form.nbytes,)) for form in FORMS]
        assert directory.write(number, other, values).base is None
    damaged = 0
    for path in sorted((tmp_path / "whole").glob("weight_v00000[123]/*")):
        for at, data in ((0, b"{"), (-1, b""), (path.stat().st_size // 2, b"\x00\xff{")):
            job = begun(f"{path.parent.name}-{path.name}-{at}")
            file = tmp_path / f"{path.parent.name}-{path.name}-{at}" / path.parent.name / path.name
            before = file.read_bytes()
            file.write_bytes(before[:at] + data + before[at + len(data) :] if data else before[:at])
            try:
                directory = WeightDirectory(file.parents[1])
            except DamagedData:
                assert file.suffix == ".json"
                continue
            with directory:
                damaged += write(directory, job)[0]
            # Damage at the end of a delta may be in the padding of its header, or change nothing.
            if path.suffix == ".safetensors":
                assert directory.versions[4]
                server = Server()
                server.pull(file.parents[1])
                job.assert_served(server)
    assert damaged > 5


@pytest.mark.parametrize(("anchor_every", "keep"), [(1, 1), (4, 1), (4, 3), (3, 6), (20, 5)])
def test_old_versions_go_and_never_one_that_a_kept_one_builds_on(tmp_path, anchor_every, keep):
    job = Job()
    with WeightDirectory(tmp_path, anchor_every=anchor_every, keep=keep) as directory:
        for number in range(1, 14):
            write(directory, job)
            followers(tmp_path, job)
            there = sorted(int(each.name[-6:]) for each in tmp_path.glob("weight_v*"))
            assert there == list(directory.versions)
            assert there[-1] == number
            assert min(number, keep) <= len(there) < keep + anchor_every
    assert {path.name for path in tmp_path.iterdir()} == {"latest", *(f"weight_v{each:06d}" for each in there)}


@pytest.mark.long
def test_files_of_the_model_are_in_each_full_version_and_transformers_loads_it(tmp_path):
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).bfloat16()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    forms = [TensorForm(name, DType.BFLOAT16, tuple(value.shape)) for name, value in model.named_parameters()]

    def values() -> Values:
        copies = [(name, value.detach().clone()) for name, value in model.named_parameters()]
        return {name: value.flatten().view(torch.uint8).numpy().data for name, value in copies}

    beside = files_beside(tmp_path / "model")
    with WeightDirectory(tmp_path / "versions", anchor_every=2, beside=beside, max_file_bytes=3000) as directory:
        for number in (1, 2, 3):
            with torch.no_grad():
                for value in model.parameters():
                    value[0] += 1
            directory.write(number, forms, values())
    server = Server()
    server.pull(tmp_path / "versions", 1)
    assert {"config.json", "tokenizer.json"} <= server.files
    newest = tmp_path / "versions" / "weight_v000003"
    assert len(list(newest.glob("model-*-of-*.safetensors"))) > 1
    loaded = transformers.GPT2LMHeadModel.from_pretrained(newest, dtype=torch.bfloat16)
    for (name, value), (other, mine) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(value.view(torch.int16), mine.view(torch.int16))


def test_files_of_a_full_version_are_those_that_other_libraries_read(tmp_path):
    job = Job()
    with WeightDirectory(tmp_path) as directory:
        write(directory, job)
    path = tmp_path / "weight_v000001" / "model-00001-of-00001.safetensors"
    loaded = load_file(path)
    assert loaded["layer.weight"].shape == (20, 24)
    assert loaded["steps"].shape == ()
    assert loaded["empty"].shape == (0, 7)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["full", "delta", "removal"])
def test_death_between_any_two_file_operations_leaves_the_version_before_or_the_new_one(tmp_path, kind):
    keep = 2 if kind == "removal" else 9

    def begun(path: Path) -> tuple[Job, WeightDirectory]:
        job, directory = Job(), WeightDirectory(path, anchor_every=2, keep=keep)
        write(directory, job, {"full": 2, "delta": 3, "removal": 4}[kind])
        return job, directory

    job, directory = begun(tmp_path / "counted")
    total = counted(lambda: write(directory, job))
    directory.close()
    assert total > 10
    found = []
    for number in range(total):
        path = tmp_path / str(number)
        job, directory = begun(path)
        before = directory.newest
        with dies_at(number):
            write(directory, job)
        directory.close()
        followers(path, job)
        found.append(max(int(each.name[-6:]) for each in path.glob("weight_v*")) - before)
        with WeightDirectory(path, anchor_every=2, keep=keep) as directory:
            job.number = directory.newest
            assert (path / "latest").read_text() == f"weight_v{directory.newest:06d}"
            write(directory, job, 2)
        followers(path, job)
        assert not list(path.glob(".*"))
        shutil.rmtree(path)
    assert found == sorted(found)
    assert set(found) == {0, 1}


def test_a_full_disk_at_any_operation_is_said_and_leaves_the_versions_before(tmp_path):
    with WeightDirectory(tmp_path / "counted", anchor_every=2) as directory:
        job = Job()
        write(directory, job)
        total = counted(lambda: write(directory, job), growing)
    for number in range(total):
        path = tmp_path / str(number)
        job = Job()
        with WeightDirectory(path, anchor_every=2) as directory:
            write(directory, job)
            with full_at(number), pytest.raises(StorageFull, match=r"no room to write a version .*remedy: free"):
                write(directory, job)
            followers(path, job)
            job.number = directory.newest
            write(directory, job)
            followers(path, job)


def test_where_fewer_versions_are_kept_the_others_go_before_the_next_is_written(tmp_path):
    job = Job()
    with WeightDirectory(tmp_path, anchor_every=1) as directory:
        write(directory, job, versions=5)
    with WeightDirectory(tmp_path, anchor_every=1, keep=2) as directory:
        # Not at once: it may be the directory of another name.
        assert list(directory.versions) == [1, 2, 3, 4, 5]
        with full_at(3), pytest.raises(StorageFull, match="keep fewer versions"):  # each removal is synced
            write(directory, job)
        assert list(directory.versions) == [4, 5]
        followers(tmp_path, job)


def test_everything_is_synced_before_a_version_appears_and_again_afterwards(tmp_path):
    job, unsynced = Job(), Unsynced()
    with WeightDirectory(tmp_path, anchor_every=1, keep=1) as directory:
        write(directory, job, 2)
        with watched(unsynced.before):
            write(directory, job)
    assert unsynced.at_renames[0] <= {tmp_path}
    # Of the version that went, nothing is there to be synced.
    assert unsynced.paths <= {tmp_path, tmp_path / ".weight_v000002.part"}


def test_a_directory_says_whose_versions_it_has_while_it_has_some(tmp_path):
    job, mine = Job(), Origin("policy", "a job")
    with WeightDirectory(tmp_path) as directory:
        assert directory.origin is None
        directory.begin(mine)
    with WeightDirectory(tmp_path) as directory:
        assert directory.origin is None
        write(directory, job)
    with WeightDirectory(tmp_path) as directory:
        assert directory.origin == mine
    (tmp_path / "origin.json").write_text("{}")
    with pytest.raises(DamagedData, match="does not say whose versions are there"):
        WeightDirectory(tmp_path)


def test_one_process_at_a_time_writes_a_directory(tmp_path):
    with (
        WeightDirectory(tmp_path),
        pytest.raises(ConfigError, match="another process writes the versions"),
    ):
        WeightDirectory(tmp_path)
    WeightDirectory(tmp_path).close()


def test_what_is_no_version_of_this_directory_is_refused_and_changes_nothing(tmp_path):
    job = Job()
    with WeightDirectory(tmp_path) as directory:
        write(directory, job, 3)
        number, forms, values = job.next()
        for wrong in (-1, 0, 2, 3):
            with pytest.raises(InvalidRequest, match="takes no version of this number"):
                directory.write(wrong, forms, values)
        with pytest.raises(InvalidRequest, match=r"bytes of a tensor.*variable: layer\.bias"):
            directory.write(number, forms, {**values, "layer.bias": values["layer.bias"][1:]})
        with pytest.raises(InvalidRequest, match="cannot hold this tensor"):
            directory.write(number, (*forms, forms[0]), values)
        assert directory.newest == 3
        job.number = 3
        followers(tmp_path, job)
        assert not list(tmp_path.glob(".*"))
    for wrong in ({"anchor_every": 0}, {"keep": 0}):
        with pytest.raises(ConfigError, match="at least"):
            WeightDirectory(tmp_path, **wrong)
    (tmp_path / "weight_v000002" / "model.safetensors.index.json").write_text("[")
    with pytest.raises(DamagedData, match=r"weight_v000002/model\.safetensors\.index\.json is no index"):
        WeightDirectory(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        WeightDirectory(tmp_path / "latest" / "below")


def test_a_folder_that_is_no_checkpoint_of_hugging_face_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        files_beside(tmp_path / "absent")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"no Hugging Face checkpoint.*actual: nothing"):
        files_beside(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".hidden").write_text("{}")
    assert files_beside(tmp_path) == {"config.json": b"{}"}
    with mock.patch.object(weight_directory, "_MOST_BESIDE_BYTES", 1), pytest.raises(ConfigError, match="beside"):
        files_beside(tmp_path)


def test_versions_are_as_open_as_their_files_are_by_default(tmp_path):
    with WeightDirectory(tmp_path) as directory:
        write(directory, Job())
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "weight_v000001").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "latest").stat().st_mode & 0o777 == 0o666 & ~mask
