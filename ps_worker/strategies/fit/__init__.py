"""``Strategy.fit`` and ``Strategy.evaluate``: a loop over epochs, and nothing that a strategy does not have.

``loop`` owns an epoch and a fit; ``replica`` is what it asks of a strategy. ``settings`` checks what is given;
``accumulation`` decides which batches make a step; ``inputs`` makes loaders of arrays; ``callbacks`` has what users
add; ``saved`` owns the file of a checkpoint.
"""
