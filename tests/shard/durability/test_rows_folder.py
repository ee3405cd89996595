"""Where the rows of tables are that are not in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from tests.support.loops import LoopThread


@pytest.mark.parametrize("durability", Durability)
def test_rows_are_on_the_disk_of_the_data_directory_with_each_durability(
    durability: Durability, tmp_path: Path
) -> None:
    executor = ShardExecutor(1)
    with LoopThread() as loop:
        storage = loop.run(
            Storage.open(3, StorageConfig(durability, tmp_path / "data", table_memory_bytes=1), executor)
        )
        assert storage.row_memory.folder == tmp_path / "data" / "shard-3"
        assert storage.row_memory.folder.is_dir()
        loop.run(storage.close(snapshot=False))
    executor.close()
