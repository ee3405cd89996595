"""Deterministic simulation: the real decisions of every role, driven by one seed through faults, and judged.

Real: ClusterState with its memento and journal rows, DataLeases, placement, Tracker, ParkedPulls, log records, Scan.
Simulated, each as thin as it can be: time, network, disks, and the shells of coordinator, shard and worker.
"""
