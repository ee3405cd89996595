"""A standby announces its address once: the reader of a pipe may have gone when it takes over."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ps_protocol.client.coordinator import CoordinatorClient
from ps_server.shard.config import ShardConfig
from ps_server.shard.process import ShardProcess


def test_a_pipe_that_was_read_once_may_be_closed_by_its_reader():
    readable, writable = os.pipe()
    with os.fdopen(writable, "w"), CoordinatorClient("127.0.0.1:1") as client:
        config = ShardConfig(shard=0, coordinator="127.0.0.1:1", ready_file=Path(f"/dev/fd/{writable}"))
        process = ShardProcess(config, client, asyncio.Event())
        with os.fdopen(readable) as reader:
            process.announce_ready("127.0.0.1:7000")
            assert reader.readline() == "127.0.0.1:7000\n"
        process.announce_ready("127.0.0.1:7000")
