"""Reads a shard's region in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ps_protocol.model.layout import Range
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.memory.payloads import copy_end_to_end


class SharedRegion:
    """A mapped region of a shard, read only: a write to ``_values`` would end the process. Used by its transport."""

    def __init__(self, segment: SharedMemory) -> None:
        #: What is mapped; it may be larger than the region.
        self.memory = segment
        # torch warns of read-only buffers, so the buffer is passed by its address; nothing here writes to it.
        address = np.frombuffer(segment.bytes, dtype=np.uint8).ctypes.data
        memory = (ctypes.c_uint8 * len(segment.bytes)).from_address(address)
        self._values = torch.frombuffer(memory, dtype=torch.uint8)

    def copy_to(self, pieces: Sequence[memoryview], ranges: Sequence[Range]) -> None:
        """Copy ``ranges`` of the region, end to end, into ``pieces``, which hold as many bytes together."""
        targets = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces if len(piece)]
        copy_end_to_end(targets, [self._values[begin:end] for begin, end in ranges])
