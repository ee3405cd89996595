"""The optimizer on a shard: regions of bytes seen as tensors, and torch.optim's own classes run over them."""

from ps_server.optimizers.catalog import check_options, validate
from ps_server.optimizers.combine import assign_buffers, average, average_buffers, blend_buffers
from ps_server.optimizers.finite import first_nonfinite
from ps_server.optimizers.region import Region, torch_dtype
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.optimizers.state import StateEntry, StateKey

__all__ = [
    "Region",
    "ShardOptimizer",
    "StateEntry",
    "StateKey",
    "assign_buffers",
    "average",
    "average_buffers",
    "blend_buffers",
    "check_options",
    "first_nonfinite",
    "torch_dtype",
    "validate",
]
