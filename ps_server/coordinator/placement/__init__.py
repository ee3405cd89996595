"""Placement of models on shards: initial placement, limits, plans of moves. ``PlacementState`` owns the shard maps."""
