"""Shards forked from one process that has imported their modules, which ps-run starts once (decision 58).

``server.py`` is that process: it owns its imports and the connection to ps-run, and nothing of a shard. ``title.py``
makes a forked shard show the command line that it would have as a program.
"""
