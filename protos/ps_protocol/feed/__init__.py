"""The reading side of a table's change feed."""
