"""ps-run --hosts: the processes of a job on several hosts, over one connection of ssh to each.

``job.py`` has the options. ``placing.py`` decides which process runs on which host, without I/O. ``fleet.py`` owns the
connections of ps-run, ``link.py`` one of them with its thread; ``host_program.py`` runs at the other end and owns the
processes there. ``messages.py`` has what they exchange.
"""
