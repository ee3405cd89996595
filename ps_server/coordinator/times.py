"""What the coordinator waits for, and for how long; what others have to agree on is in ``ps_protocol.times``."""

from __future__ import annotations

# -- members

DISCONNECTED_SECONDS = 5.0
"""A member whose connection has ended, as when its process dies, stays so long, if its lease is not shorter."""
RESTART_SECONDS = 3.0
"""Leases last so much longer after a restart: gRPC tries an address again about once a second."""
PARKED_SECONDS = 30.0
"""A call waits so long for other workers before it is answered that they have not come; its caller repeats it."""
ANSWER_SECONDS = 0.5
"""Such a call is answered so long before the deadline of its caller."""
VIEW_SECONDS = 2.0
"""A change waits so long, at most, before watchers receive it, however many they are."""

# -- checkpoints and moves

LOOK_SECONDS = 0.5
"""The coordinator looks at this interval whether a checkpoint is due, and whether its job can end."""
LAST_CHECKPOINT_SECONDS = 30.0
"""The last checkpoint of a job is tried so long while a shard is missing: it may be starting again."""
BUSY_SECONDS = 5.0
"""A release waits so long for a checkpoint or a batch of a move before its caller has to repeat it."""
PAUSE_SECONDS = 0.12
"""One batch of a move should pause training so long, at most."""
BREATH_SECONDS = 1.2
"""Training goes on so long between two batches, beside some time for their pauses: shards make memory and connect."""

# -- decisions about slow workers and hot shards

HOLD_SECONDS = 30.0
"""A state of workers or shards counts, and is over, once it has lasted so long; so is a growth."""
LONGEST_HOLD_SECONDS = 300.0
"""The same for shards, where it changes now and then."""
SETTLE_SECONDS = 60.0
"""Shards are not judged for so long after a move."""
GIVEN_SECONDS = 24 * 3600.0
"""A shard gives nothing for so long to one that it has received from: with the same load that would go on for ever."""

# -- divergence

SILENT_SECONDS = 600.0
"""A growth counts so long after the last word of it: its member may be gone."""

# -- files

SAVE_SECONDS = 60.0
"""The history is written to its file at this interval, and at the end."""
