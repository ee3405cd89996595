"""Slices and row buckets that move between shards: planned, transferred, staged, then made or dropped."""
