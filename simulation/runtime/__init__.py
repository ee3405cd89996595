"""Runs the shipped code in one thread and in virtual time: event loop, threads, gRPC, files and randomness.

``kernel`` owns time and processes, ``threads`` and ``futures`` stand for Python's, ``calls``, ``clients`` and
``servers`` for gRPC over ``network``, ``disk`` for the file system; ``substitutes`` puts them in place.
"""
