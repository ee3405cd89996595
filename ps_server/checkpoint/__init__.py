"""Checkpoints of a whole job: shards write parts, one process commits them, any number of shards reads them back.

What is named here needs no torch. Shards also use ``writer.write_part``, ``restore.read_values`` and
``restore.read_state``; those who handle rows ``export.export`` and ``table_reader.saved_table``.
"""

from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin, committed, discard, latest, prune
from ps_server.checkpoint.manifest import Manifest
from ps_server.checkpoint.record import Facts, ModelRecord, Part

__all__ = [
    "Checkpoint",
    "Facts",
    "Manifest",
    "ModelRecord",
    "Part",
    "begin",
    "commit",
    "committed",
    "discard",
    "latest",
    "prune",
]
