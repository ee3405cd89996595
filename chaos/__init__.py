"""Trains a small model on a real cluster while its processes are killed, frozen, parted and starved of disk space."""
