"""Where a shard's work runs: `ShardExecutor` owns the order of tensor work, `Watchdog` its time limit.

``tasks`` has what awaits other tasks, threads and conditions to their end.
"""
