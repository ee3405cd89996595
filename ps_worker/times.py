"""What a worker waits for, and for how long; what servers have to agree on is in ``ps_protocol.times``."""

from __future__ import annotations

TERMINATION_SECONDS = 3.0
"""SIGTERM waits so long for the end of a step: less than ps-run leaves a script before SIGKILL."""
TOUCH_SECONDS = 5.0
"""The file that a liveness probe looks at is touched at this interval; the probe allows for many times that."""

SIDE_CHANNEL_SECONDS = 3.0
"""A stream waits so long for a side channel of its shard before it tries the next transport."""

WAIT_SECONDS = 1.0
"""The coordinator parks a question about other workers for so long before it answers that they have not come."""
LEASE_SECONDS = 5.0
"""The same for a request for items of a dataset that others have."""

LAST_VALUES_SECONDS = 2.0
"""A worker that has set values waits so long at its end for others that have."""

NO_OP_PAUSE_SECONDS = 0.01
"""A worker without data makes a no-op step at this interval, where others wait."""
NO_OP_AGAIN_SECONDS = 0.02
"""The same where others are known to wait: the next step may be needed at once."""
