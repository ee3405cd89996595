"""Where a shard's work runs: `ShardExecutor` owns the order of tensor work, `Watchdog` its time limit."""
