"""State that survives the process: the data directory, its snapshots, and replication to the standby."""
