"""Checkpoints of a whole job: shards write their parts, one process commits the manifest, any shards read them back.

``manifest``, ``record``, ``file_plan`` and ``table_columns`` define what the files hold, ``validation`` checks what is
read; ``directory`` numbers checkpoints, ``files`` writes and opens their files. Shards write with ``model_writer`` and
``table_writer``, the coordinator with ``commit``; ``checkpoint``, ``model_reader`` and ``table_reader`` read, and
``export`` writes files for other tools, ``weight_directory`` versions of weights for servers that follow them. Only
what handles rows or values imports torch.
"""
