"""The job at a glance: what the page, ``psctl top`` and ``psctl report`` show, made of what the coordinator knows.

Pure: ``state`` decides in what state members and the job are, for ``psctl status`` and ``ps-run``, too; ``glance_of``
in ``job`` turns a JobHistory into a JobGlance, and ``workers``, ``shards`` and ``alerts`` are its parts. Nothing is
owned here.
"""
