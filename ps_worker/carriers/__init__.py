"""How a worker's pushes and a shard's answers travel: one interface, a carrier per transport."""

from ps_worker.carriers.carrier import Carrier, Link
from ps_worker.carriers.negotiate import open_stream

__all__ = ["Carrier", "Link", "open_stream"]
