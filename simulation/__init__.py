"""Deterministic simulation: the coordinator, the shards and the workers that ship, through faults, judged.

``programs`` starts what users start, ``world`` decides what goes wrong, ``observers`` tells ``judge`` what happens, and
``runtime`` stands for time, threads, network and disks.
"""
