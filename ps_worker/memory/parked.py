"""Gives the user private mappings of gradients whose memory is being pushed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ps_worker.memory.blocks import FlatMemory, alone
from ps_worker.memory.plan import FlatPlan
from ps_worker.memory.users import expected_users, users


class ParkedGradients:
    """Used by GradientBuffers, for blocks in segments: copy-on-write tensors of the same bytes.

    Writing a page copies it; other pages are the block's, which does not change during a push.
    """

    def __init__(self, plan: FlatPlan, blocks: Sequence[FlatMemory | None]) -> None:
        """Raises OSError."""
        self._mappings = [None if block is None or not len(block.host) else block.private() for block in blocks]
        self._plan = plan
        self._tensors: dict[int, torch.Tensor] = {}

    def take(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Tensors with the current values of these variables."""
        for mapping in self._mappings:
            if mapping is not None:
                mapping.renew()
        return [self._tensor(number) for number in numbers]

    def has(self, number: int, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is that of this variable here."""
        return self._tensors.get(number) is gradient

    def are_kept(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether anything still uses a tensor from here that is no longer a gradient."""
        free = expected_users(1, is_gradient=False)
        for number in self._tensors:
            tensor = self._tensors[number]
            if parameters[number].grad is not tensor and users(tensor) != free:
                return True
        return False

    def part(self) -> None:
        """Copy all pages, so that the tensors keep their values if the blocks change. Raises OSError."""
        for mapping in self._mappings:
            if mapping is not None:
                mapping.part()

    def _tensor(self, number: int) -> torch.Tensor:
        if number not in self._tensors:
            (shard, (begin, end)), variable = self._plan.unparted[number], self._plan.variables[number]
            mapping = self._mappings[shard]
            memory = mapping.bytes if mapping is not None else memoryview(bytearray())
            data = torch.frombuffer(memory[begin:end], dtype=torch.uint8)
            shaped = alone(data).view(getattr(torch, variable.dtype.value)).view(variable.shape)
            self._tensors[number] = shaped
        return self._tensors[number]
