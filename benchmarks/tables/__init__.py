"""Rows of sparse tables: how fast they come and go, what a step with them costs, what they take of memory and disk."""
