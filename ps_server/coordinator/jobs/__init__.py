"""Coroutines beside the driver: checkpoints, moves of slices, declarations, pausing all shards, the end of the job."""
