"""A second process for the place of a shard: LogFeed serves the log, LogFollower keeps a copy, Standby takes over."""
