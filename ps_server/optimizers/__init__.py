"""The optimizer on a shard: regions of bytes seen as tensors, and torch.optim's own classes run over them."""

from ps_server.optimizers.blocks import Block, blocks_of
from ps_server.optimizers.catalog import check_options, validate
from ps_server.optimizers.combine import assign_buffers, average, average_buffers, blend_buffers
from ps_server.optimizers.finite import first_nonfinite
from ps_server.optimizers.region import Region, torch_dtype
from ps_server.optimizers.replica import Replica, Skipped, Step, copy_region
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.optimizers.state_bytes import describe, read_state, taken, tensor_bytes
from ps_server.optimizers.undo import StepSkipped, require_counters

__all__ = [
    "Block",
    "Region",
    "Replica",
    "ShardOptimizer",
    "Skipped",
    "StateEntry",
    "StateKey",
    "Step",
    "StepSkipped",
    "assign_buffers",
    "average",
    "average_buffers",
    "blend_buffers",
    "blocks_of",
    "check_options",
    "copy_region",
    "describe",
    "first_nonfinite",
    "read_state",
    "require_counters",
    "taken",
    "tensor_bytes",
    "torch_dtype",
    "validate",
]
