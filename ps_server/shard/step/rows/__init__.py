"""Rows of tables in a step: those that a push brings, those that a lookup asks for, and those of one model."""
