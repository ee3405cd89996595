"""One interface over the ways to train on several devices or processes: ``ps_worker.strategy(name)``.

``registry`` knows the names, finds the one that nobody stated, and makes a strategy. ``base`` is the interface and what
all share; ``fit`` trains by the words of Keras. ``one_device``, ``cluster_strategies`` (parameter_server,
central_storage), ``data_parallel`` (mirrored, multi_worker_mirrored) and ``tpu`` with ``xla`` are the strategies: each
owns its device, and its connection or process group, from its constructor to ``close``. ``process_group`` reads which
replica this process is, and connects the replicas.
"""
