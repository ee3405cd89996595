"""The workers of one host, which push together: one of them, the leader, sends the mean of their gradients for all.

``core`` decides, without clock, socket or memory: whom a leader waits for, when a round is complete, who pushes by
itself. ``group`` finds the others of the host and says who leads; ``leader`` and ``follower`` are the two ends of a
connection, ``messages`` what goes over it, ``memory`` what they map of each other, ``folder`` where they meet.

The leader's state is ``core.HostRounds``, used by its thread and by the thread that makes exchanges, under one lock.
A follower owns its gradients, the leader the parameters that it lends. Neither writes memory that the other may read
before it has closed the connection; who has read looks at the connection once more before it uses what it read.
"""
