"""One step on a worker: gradients to all shards, parameters back, through broken streams and moved slices."""
