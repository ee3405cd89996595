"""Steps of many workers of one shard, beside the peers."""
