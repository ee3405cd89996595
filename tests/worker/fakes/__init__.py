"""A session without a coordinator, and shards in this process that speak the protocol and misbehave when told to.

`session.py`: the place in the cluster, which owns the shards; `placement.py`: which shard holds what; `shard.py`: one
shard's calls; `model.py`: what it holds, dense; `tables.py`: its rows; `payloads.py`: bytes on their way; `faults.py`:
what goes wrong.
"""

from tests.worker.fakes.placement import place
from tests.worker.fakes.session import FakeSession, job
from tests.worker.fakes.tables import first_row

__all__ = ["FakeSession", "first_row", "job", "place"]
