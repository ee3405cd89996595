"""What asynchronous updates do to a model: trainings on a virtual clock, with exact delays.

``tasks`` says what is learned, ``laboratory`` runs one training with the decisions (``Tracker``) and updates
(``Replica``, ``average``) that shards run, ``grid`` many of them in processes, and ``stability`` finds the largest
stable learning rate beside the theory. ``python -m benchmarks.learning`` shows them.
"""
