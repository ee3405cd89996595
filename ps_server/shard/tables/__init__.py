"""Calls about rows of tables: reads, writes, the change feed, and the expiry of rows."""
