"""A program in which type checkers that see the installed types find a wrong argument; never run."""

import ps_worker

cluster: ps_worker.Cluster = ps_worker.connect(coordinator=7)
