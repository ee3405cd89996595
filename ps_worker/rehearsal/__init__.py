"""A user's script with many virtual workers in one process, on a virtual clock: what ``ps-run rehearse`` starts.

``turns`` decides which worker runs: one at a time, in the order of a virtual clock. ``workers`` runs the script in a
thread for each worker, whose session passes the turn wherever it waits. ``substitutes`` stands for what a script cannot
use there. ``main`` makes one rehearsal, with a coordinator and a shard of its own, and reports it.
"""
