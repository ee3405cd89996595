"""The flat memory that parameters are views of, and the bytes of each shard's region in it."""
