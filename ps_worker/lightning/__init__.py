"""Lightning and Fabric on the cluster: importing this makes ``strategy="torch_ps"`` known to both.

Needs the extra ``lightning``. ``process.py`` owns the connection of this process, a strategy the exchanges of its
trainer; the shards run the optimizers, and the user's module stays the user's.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from ps_worker.lightning.fabric import TorchPsFabricStrategy
from ps_worker.lightning.trainer import TorchPsStrategy

__all__ = ["TorchPsFabricStrategy", "TorchPsStrategy"]

NAME = "torch_ps"
"""What ``L.Trainer`` and ``Fabric`` are given as ``strategy``."""

StrategyRegistry.register(NAME, TorchPsStrategy, description="torch-ps: a parameter server", override=True)
STRATEGY_REGISTRY.register(NAME, TorchPsFabricStrategy, description="torch-ps: a parameter server", override=True)
