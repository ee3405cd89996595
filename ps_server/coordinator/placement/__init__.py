"""Which shards hold what: first placement, limits, plans of moves. ``PlacementState`` owns the shard maps."""
