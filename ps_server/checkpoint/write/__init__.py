"""Writing a checkpoint: each shard its own files, one process the manifest."""
