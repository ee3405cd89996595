"""What a shard waits for, and for how long; what others have to agree on is in ``ps_protocol.times``."""

from __future__ import annotations

RETRY_SECONDS = 0.2
"""Another process that is away, or a place that is not free, is tried again after this pause."""
FULL_RETRY_SECONDS = 5.0
"""The same where a disk was full, or a snapshot failed."""

# -- requests

UNKNOWN_SECONDS = 10.0
"""A request waits so long for a model or a membership that this shard does not know yet."""
PLACING_SECONDS = 2.0
"""A request waits so long for a model that is being placed before it is answered how far that is."""
REPLY_SECONDS = 1.0
"""A push waits so long for the reply before it to be sent."""
NORM_SECONDS = 5.0
"""The question of another shard for the norm of a round waits so long before that shard has to ask again."""
UNREAD_SECONDS = 0.05
"""A new version waits so long for readers of the one whose memory it takes."""

# -- quiesces and moves

CATCH_UP_SECONDS = 30.0
"""A quiesce waits so long for pushes that another shard has accepted."""
LONGEST_QUIESCE_SECONDS = 600.0
"""No quiesce may pause a shard for longer without a further call."""
REST_SECONDS = 10.0
"""A move is taken to be over after so long without another batch."""
OUTCOME_SECONDS = 10.0
"""A new quiesce waits so long for the outcome of a move."""

# -- work that is done at intervals

SNAPSHOT_LOOK_SECONDS = 0.25
"""A shard looks at this interval whether a snapshot is due."""
SAMPLE_SECONDS = 0.25
"""The end of the log is noted at this interval. An age is short of the truth by so much at most."""
EXPIRY_SECONDS = 0.5
"""Tables are checked at this interval for expired rows."""

# -- the watchdog

STUCK_SECONDS = 60.0
"""A piece of work may take so long, beside the time for its bytes, unless a shard is started with another limit."""
WATCH_SECONDS = 1.0
"""The watchdog looks at this interval."""
