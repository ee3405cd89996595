"""Engines start workers. ``base`` defines the interface, ``find`` resolves ``--engine``."""
