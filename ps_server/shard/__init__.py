"""One shard: a process that holds slices of models, applies pushes to them and answers with parameters.

The process owns its data directory and its place in the cluster, the Registry its models, each model its arenas,
optimizer state and clocks, the executor the order of tensor work.
"""
