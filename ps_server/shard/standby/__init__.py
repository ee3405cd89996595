"""The standby of a shard: LogFeed serves the shard's log, LogFollower keeps a copy, Standby takes over."""
