"""The ordered log of a shard's updates and its snapshots: files, records, and recovery from them.

``DurableLog`` writes segments, ``DataFolder`` owns the directory, ``recovery.recover`` reads both back into models.
"""
