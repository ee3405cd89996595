"""Checkpoints of a whole job: shards write their parts, one process commits the manifest, any shards read them back.

``format`` says what the files hold, ``folder`` how folders are numbered and opened; ``write``, ``read`` and ``export``
are the three things done with them. Only what handles rows or values imports torch.
"""
