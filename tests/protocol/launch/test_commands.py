"""The command line of a server."""

from __future__ import annotations

from pathlib import Path

from ps_protocol.launch.commands import flags
from ps_protocol.model.spec import Mode


def test_a_setting_is_the_flag_of_its_name_and_one_that_is_not_set_is_none() -> None:
    settings = {
        "max_calls": 7,
        "data_dir": Path("/data"),
        "mode": Mode.SYNC,
        "fsync": True,
        "rebalance": False,
        "seed": None,
        "token_seconds": 2.5,
        "staleness": 0,
        "checkpoint_dir": (Path("a"), Path("b")),
    }
    assert flags(settings) == [
        *("--max-calls", "7", "--data-dir", "/data", "--mode", "sync", "--fsync"),
        *("--token-seconds", "2.5", "--staleness", "0", "--checkpoint-dir", "a", "--checkpoint-dir", "b"),
    ]
    assert flags({}) == []
