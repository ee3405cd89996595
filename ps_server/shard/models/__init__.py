"""The models of one shard: `Registry` owns them, one `ShardModel` each, and follows the cluster's view.

``placing`` and ``restore`` make the state that a model starts with: new, from this shard's disk or from a checkpoint.
``dropping`` logs that one was released.
"""
