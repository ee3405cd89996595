"""A shard: the arenas of its slices, the optimizer that steps them, and the gRPC service in front."""
