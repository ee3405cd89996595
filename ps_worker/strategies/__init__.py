"""One interface over the ways to train on several devices or processes: ``ps_worker.strategy(name)``.

``registry`` knows the names and makes a strategy; ``choice`` finds the name that nobody stated. ``base`` is the
interface and what all share. ``one_device``, ``cluster_strategies`` (parameter_server, central_storage),
``data_parallel`` (mirrored, multi_worker_mirrored) and ``tpu`` are the strategies: each owns its device, and its
connection or process group, from its constructor to ``close``. ``placement`` reads which replica this process is;
``reductions`` has the ways to average gradients. ``fit`` trains.
"""
