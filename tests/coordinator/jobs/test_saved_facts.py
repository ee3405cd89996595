"""What a checkpoint says of the job is read with care: anything else than a coordinator wrote is one typed error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import DamagedData
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.manifest import Manifest
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.persistence.saved_facts import saved_data, saved_phase, saved_seed
from ps_server.coordinator.settings import ClusterSettings

RIGHT: dict[str, Any] = {"phase": 3, "data": DataLeases().persisted_state(), "seed": 7}


def checkpoint_with(facts: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("/there"), Manifest("1", 0.0, facts, {}))


def test_what_a_coordinator_wrote_is_read() -> None:
    saved = checkpoint_with(RIGHT)
    assert (saved_phase(saved), saved_seed(saved), saved_data(saved).persisted_state()) == (3, 7, {})


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(
    "wrong", [None, "x", -1, 1 << 70, 0.5, [1], {"a": 1}, {"a": {"length": 1}}, {"a": {"epoch": []}}]
)
def test_anything_else_is_one_typed_error(name: str, wrong: Any) -> None:
    read = {"phase": saved_phase, "data": saved_data, "seed": saved_seed}[name]
    for facts in ({**RIGHT, name: wrong}, {key: value for key, value in RIGHT.items() if key != name}):
        with pytest.raises(DamagedData, match=f"does not hold the {name}") as refused:
            read(checkpoint_with(facts))
        assert refused.value.remedy


def test_a_coordinator_does_not_start_from_it() -> None:
    with pytest.raises(DamagedData):
        Driver(ClusterSettings(), saved=checkpoint_with({**RIGHT, "phase": "x"}))
