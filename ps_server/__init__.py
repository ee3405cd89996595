"""The servers of torch-ps: coordinator, shards, and the programs that start and inspect them."""
