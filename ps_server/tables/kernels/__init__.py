"""Compiled loops over rows and ids. Arguments are addresses and numpy arrays."""
