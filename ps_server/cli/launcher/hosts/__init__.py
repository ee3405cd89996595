"""ps-run --hosts: the processes of a job on several hosts, over one connection of ssh to each.

``fleet.py`` owns the connections of ps-run, ``link.py`` one of them with its thread; ``host_program.py`` is what runs
at the other end and owns the processes there. What they say to each other is in ``messages.py`` and ``frames.py``.
Which process goes where, and what a failed connection means, is decided without I/O in ``entries.py``, ``placing.py``
and ``failures.py``.
"""
