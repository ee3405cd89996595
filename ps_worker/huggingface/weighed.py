"""An accelerated optimizer whose pushes have weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step

from ps_worker.optimizer import PsOptimizer


class WeighedOptimizer(AcceleratedOptimizer):
    """Wraps an optimizer of the cluster: steps once per accumulation, with ``weight`` as the weight of the push.

    Its state stays on the shards: making it neither pulls nor pushes.
    """

    def __init__(self, optimizer: PsOptimizer, scaler: Any = None) -> None:
        #: The number of samples or tokens of the next step; None: each push weighs the same.
        self.weight: float | None = None
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        if scaler is not None:
            self._optimizer_patched_step_method = patch_optimizer_step(self, self._push)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """As in accelerate. Raises what the optimizer's ``step`` raises."""
        if self.scaler is not None:
            super().step(closure)
        elif self.gradient_state.sync_gradients:
            self._push(closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, by the gradient scaler or by the policy for NaN."""
        return bool(self._is_overflow or self.optimizer.step_was_skipped)

    def _push(self, closure: Callable[[], float] | None = None) -> Any:
        # The class's method: the scaler's path has put another one on the instance.
        return type(self.optimizer).step(self.optimizer, closure, weight=self.weight)
