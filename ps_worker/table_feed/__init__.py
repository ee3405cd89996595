"""A copy of a table that follows its changes."""
