"""A worker's place in the cluster: configuration, membership, channels, progress, and its end."""
