"""Reading a checkpoint back under any shard map."""
