"""The flat memory that parameters are views of, and the bytes each shard's region takes there."""
