"""Tests of jobs in a Ray cluster."""

STEPS, BEFORE = 30, 5
"""Steps of each worker; after how many of them worker 1 waits to be killed."""
