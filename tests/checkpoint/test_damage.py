"""A file that is not what was written is told by name, and is not believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ps_protocol.errors import ConfigError, DamagedData
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Variable
from ps_protocol.sealed import sealed
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.export import export
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.state.region import Region
from tests.support.length import examples

from .support import Job, shard_map_of, small_spec, spec_of

SPEC = small_spec("Adam")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every test leaves it as it was."""
    job = Job.of(shard_map_of(SPEC, 2), seed=1).train([1])
    return job.save(tmp_path_factory.mktemp("checkpoints")).folder


@pytest.fixture
def values(folder: Path) -> Iterator[Path]:
    """The file with the largest variable, whole again afterwards."""
    path = folder / "model" / file_of(Checkpoint.open(folder), "layer.8", "")
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


def file_of(checkpoint: Checkpoint, variable: str, state: str) -> str:
    return next(p.file for p in checkpoint.model("model").pieces if (p.variable, p.state) == (variable, state))


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    layout = Layout.of(shard_map_of(SPEC, 1), 0)
    read_values(checkpoint, layout, Region(layout).bytes)
    read_state(checkpoint, layout)


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_flipped_bit_anywhere_is_found(folder: Path, data: st.DataObject) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    flip(path, data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7)))
    try:
        with pytest.raises(DamagedData, match=str(path)):
            Checkpoint.open(folder).verify()
        if path.name != "model.safetensors.index.json":
            with pytest.raises(DamagedData, match=str(path)):
                read_all(folder)
    finally:
        path.write_bytes(before)
    Checkpoint.open(folder).verify()
    read_all(folder)


@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_cut_anywhere_is_found(folder: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
    before = path.read_bytes()
    path.write_bytes(before[: data.draw(st.integers(0, len(before) - 1))])
    try:
        with pytest.raises(DamagedData, match=str(path)):
            Checkpoint.open(folder).verify()
    finally:
        path.write_bytes(before)


def test_an_edited_tensor_is_named_with_its_file_and_bytes(folder: Path, values: Path) -> None:
    piece = next(p for p in Checkpoint.open(folder).model("model").pieces if p.file == values.name and p.nbytes > 100)
    flip(values, piece.at + 3)
    expected = f"bytes {piece.at} to {piece.at + piece.nbytes}"
    variable = rf"{values} is damaged.*variable: {piece.variable}\[{piece.row_begin}:{piece.row_end}\]; "
    with pytest.raises(DamagedData, match=rf"{variable}expected: checksum .{{16}} of {expected}; actual: .*remedy"):
        read_all(folder)


def test_an_edited_optimizer_state_is_named(folder: Path) -> None:
    piece = next(p for p in Checkpoint.open(folder).model("model").pieces if p.state == "exp_avg" and p.nbytes > 100)
    path = folder / "model" / piece.file
    flip(path, piece.at)
    with pytest.raises(DamagedData, match=rf"{path} .*variable: {piece.variable}\[\d+:\d+\], exp_avg; "):
        read_all(folder)
    flip(path, piece.at)


def test_a_file_that_grew_is_found(folder: Path, values: Path) -> None:
    size = values.stat().st_size
    with values.open("ab") as file:
        file.write(b"!")
    with pytest.raises(DamagedData, match=f"expected: {size} bytes; actual: {size + 1} bytes"):
        read_all(folder)


def test_a_missing_file_is_named_with_the_tensor_that_was_wanted(folder: Path, values: Path) -> None:
    values.unlink()
    with pytest.raises(DamagedData, match=rf"{values} is damaged.*variable: layer.*actual: no such file"):
        read_all(folder)


def test_damage_in_rows_of_another_shard_does_not_stop_this_one(tmp_path: Path) -> None:
    spec = spec_of("SGD", [Variable("table", (4000, 700), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 1), seed=1)
    checkpoint = job.save(tmp_path)
    path = checkpoint.folder / "model" / "model-00001-of-00001.safetensors"
    flip(path, path.stat().st_size - 1)
    first, second = (Layout.of(shard_map_of(spec, 2), shard) for shard in range(2))
    region = Region(first)
    read_values(checkpoint, first, region.bytes)
    assert bytes(region.bytes) == bytes(job.shards[0].region.bytes[: first.region_bytes])
    with pytest.raises(DamagedData):
        read_values(checkpoint, second, Region(second).bytes)


def test_a_damaged_checkpoint_is_not_exported(folder: Path, values: Path, tmp_path: Path) -> None:
    flip(values, values.stat().st_size - 1)
    with pytest.raises(DamagedData):
        export(Checkpoint.open(folder), tmp_path / "export", "model")
    assert list(tmp_path.iterdir()) == []


def edited_manifest(folder: Path, tmp_path: Path, **changes: object) -> Path:
    body = json.loads((folder / "manifest.json").read_text())
    body.update(changes)
    body.pop("checksum")
    (tmp_path / "manifest.json").write_bytes(sealed(json.dumps(body).encode()))
    return tmp_path


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_refused_with_the_version_that_wrote_it(folder: Path, tmp_path: Path, other: int) -> None:
    edited = edited_manifest(folder, tmp_path, format=other, program="9.0")
    with pytest.raises(
        DamagedData, match=f"expected: format 3; actual: format {other}, written by torch-ps 9.0; remedy: "
    ):
        Checkpoint.open(edited)


@pytest.mark.parametrize("changes", [{"models": {"model": {}}}, {"models": 3}, {"checked_bytes": 7}])
def test_a_manifest_of_another_form_is_refused(folder: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(DamagedData, match=r"manifest\.json is damaged"):
        Checkpoint.open(edited_manifest(folder, tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"checksum": 1}', "[" * 100_000, "\xff"])
def test_anything_else_in_place_of_a_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedData, match=r"manifest\.json is damaged"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a complete checkpoint"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ConfigError, match="is not a complete checkpoint"):
        Checkpoint.open(tmp_path / "absent")
