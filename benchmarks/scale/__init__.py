"""What the coordinator costs per member and a shard per stream, with many of them that do little else."""
