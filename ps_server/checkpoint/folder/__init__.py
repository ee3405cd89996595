"""Checkpoint folders and files: numbered, opened without following links, written to survive a crash."""
