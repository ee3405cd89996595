"""An export is what Hugging Face would have saved, and overwrites nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ps_protocol.errors import ConfigError, ModelMismatch
from ps_protocol.model.spec import DType, Variable
from ps_server.checkpoint.export import export

from .support import Job, same_bits, shard_map_of, small_spec, spec_of


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    job = Job.of(shard_map_of(small_spec(), 3), seed=1)
    files = export(job.save(tmp_path / "checkpoints"), tmp_path / "a" / "export", "model")
    assert files == [tmp_path / "a" / "export" / "model.safetensors"]
    assert list((tmp_path / "a" / "export").iterdir()) == files
    assert same_bits(load_file(files[0]), job.values())


def test_a_large_model_is_cut_into_files_with_an_index(tmp_path: Path) -> None:
    variables = [Variable(f"w{i}", (rows, 1000), DType.FLOAT32) for i, rows in enumerate((300, 300, 900, 10))]
    job = Job.of(shard_map_of(spec_of("SGD", variables), 2), seed=1)
    files = export(job.save(tmp_path / "checkpoints"), tmp_path / "export", "model", max_file_bytes=2_500_000)
    assert [f.name for f in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 1510 * 4000}
    assert index["weight_map"] == dict(
        zip(["w0", "w1", "w2", "w3"], [files[n].name for n in (0, 0, 1, 2)], strict=True)
    )
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    assert same_bits(tensors, job.values())


@pytest.mark.parametrize("what", ["export", "export.partial"])
def test_what_is_there_is_not_overwritten(tmp_path: Path, what: str) -> None:
    checkpoint = Job.of(shard_map_of(small_spec(), 1), seed=1).save(tmp_path / "checkpoints")
    (tmp_path / what).mkdir()
    (tmp_path / what / "mine").write_text("kept")
    with pytest.raises(ConfigError, match=f"{what} exists"):
        export(checkpoint, tmp_path / "export", "model")
    assert [p.name for p in (tmp_path / what).iterdir()] == ["mine"]


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    checkpoint = Job.of(shard_map_of(small_spec(), 1), seed=1).save(tmp_path / "checkpoints")
    with pytest.raises(ModelMismatch, match="has no model 'other'"):
        export(checkpoint, tmp_path / "export", "other")
    assert not (tmp_path / "export").exists()
