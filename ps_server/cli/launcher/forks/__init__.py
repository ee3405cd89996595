"""Shards of this machine that are forked from one process, which imports their modules while the coordinator starts.

``fork_server.py`` owns that process; ``forked_child.py`` is a shard that waits for it, is forked from it, and after
that is a child of ps-run like any other.
"""
