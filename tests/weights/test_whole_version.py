"""A version of published weights in a file: the old one or the new one, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from ps_protocol.errors import DamagedData
from ps_protocol.model.spec import DType, Kind, Variable
from ps_protocol.weights import version as version_module
from ps_protocol.weights.version import WholeVersion
from tests.support.seeds import seeded

VARIABLES = (
    Variable("a", (2, 3), DType.FLOAT32),
    Variable("b", (), DType.INT64, Kind.BUFFER),
    Variable("c", (0, 5), DType.BFLOAT16),
)


def version(number: int) -> WholeVersion:
    values = {v.name: memoryview(bytes([number] * v.nbytes)) for v in VARIABLES}
    cursor = {"model": "m", "table": "t", "shards": {"0": {"updates": "3"}}}
    return WholeVersion(
        "policy", number, "m", 7, {"loss": 0.5}, 12.5, VARIABLES, values, {0: b"x" * 16}, "bfloat16", {"t": cursor}
    )


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "policy.version"
    assert WholeVersion.load(path) is None
    for number in (1, 2):
        version(number).save(path)
        assert WholeVersion.load(path) == version(number)
    assert [each.name for each in tmp_path.iterdir()] == ["policy.version"]


def test_one_flipped_bit_anywhere_and_an_end_anywhere_are_noticed(tmp_path: Path) -> None:
    path, chance = tmp_path / "policy.version", seeded()
    version(1).save(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedData, match="no version of published weights"):
            WholeVersion.load(path)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(DamagedData):
            WholeVersion.load(path)


def test_a_save_that_breaks_off_anywhere_leaves_the_version_before(tmp_path: Path) -> None:
    class Full:
        """The bytes of a variable that cannot be written."""

        def __len__(self) -> int:
            return 24

    path = tmp_path / "policy.version"
    version(1).save(path)
    for name in ("a", "b"):
        values = {**version(2).values, name: Full()}
        with pytest.raises(TypeError):
            replace(version(2), values=values).save(path)  # type: ignore[arg-type]
        assert WholeVersion.load(path) == version(1)


def test_what_another_torch_ps_has_written_is_no_version(tmp_path: Path) -> None:
    path = tmp_path / "policy.version"
    for changed in ({"more": 1}, {"manifests": []}, {"manifests": {"x": "00"}}):
        version(1).save(path)
        head = version_module._HEAD
        _, length, _ = head.unpack(path.read_bytes()[: head.size])
        text, values = path.read_bytes()[head.size :][:length], path.read_bytes()[head.size + length :]
        text = json.dumps(json.loads(text) | changed).encode()
        path.write_bytes(head.pack(b"psv1", len(text), xxhash.xxh3_128_digest(text)) + text + values)
        with pytest.raises(DamagedData, match="no version of published weights"):
            WholeVersion.load(path)
