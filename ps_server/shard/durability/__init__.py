"""What survives the process: the data directory and its snapshots, and what the standby has of the log."""
