"""What ps-run and a strategy agree on: the variables that name the strategy and where replicas meet."""

STRATEGY_VARIABLE = "PS_STRATEGY"
"""Name of the strategy of a script that names none."""

STORE_VARIABLE = "PS_REPLICA_STORE"
"""A file through which the replicas of one host find each other; set by ps-run, which needs no free port for it."""

STRATEGIES_GROUP = "torch_ps.strategies"
"""Entry points of other packages: ``name = "package.module:StrategyClass"``."""

SERVED = ("parameter_server", "central_storage")
"""The strategies that need a coordinator and shards."""

REPLICATED = ("one_device", "mirrored", "multi_worker_mirrored", "tpu")
"""The strategies whose processes are all there is."""
