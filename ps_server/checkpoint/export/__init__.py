"""Exports of checkpoints and rows to files that other programs read."""
