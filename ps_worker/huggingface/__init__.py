"""Hugging Face Trainer and Accelerate over torch-ps (extra ``hf``).

``PsTrainer`` and ``PsAccelerator`` own nothing of a job: the optimizer they adopt and the connection do.
"""

import importlib.util

if importlib.util.find_spec("accelerate") is None:
    raise ImportError("ps_worker.huggingface needs accelerate: pip install 'torch-ps[hf]'", name="accelerate")

from typing import TYPE_CHECKING, Any

from ps_worker.huggingface.accelerator import PsAccelerator

if TYPE_CHECKING:
    from ps_worker.huggingface.trainer import PsTrainer

__all__ = ["PsAccelerator", "PsTrainer"]


def __getattr__(name: str) -> Any:
    """Imports ``PsTrainer`` at its first use: transformers is needed for it alone."""
    if name == "PsTrainer":
        from ps_worker.huggingface.trainer import PsTrainer

        return PsTrainer
    raise AttributeError(f"module 'ps_worker.huggingface' has no attribute '{name}'")
