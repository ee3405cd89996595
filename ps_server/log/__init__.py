"""The ordered log of a shard's updates: what was applied, in which order, and from whom."""

from ps_server.log.updates import MemoryLog, Update, UpdateLog

__all__ = ["MemoryLog", "Update", "UpdateLog"]
