"""Mutated messages to every role of a real cluster while a small job trains beside them; ``make fuzz``."""
