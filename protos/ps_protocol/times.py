"""What waits for what, and for how long, where two processes have to agree or several wait for the same thing.

docs/times.md shows how these follow each other when a process fails. Pauses between attempts are in ``retry``.
"""

from __future__ import annotations

# -- connections

KEEPALIVE_SECONDS = 10.0
"""A connection on which nothing was received for so long is pinged,"""
KEEPALIVE_TIMEOUT_SECONDS = 5.0
"""and is closed when the ping is not answered within this time."""

CONNECT_SECONDS = 5.0
"""A caller waits so long for a connection, with its handshake, to a process that should be there."""

# -- calls

BRIEF_CALL_SECONDS = 2.0
"""A caller that goes on without the answer waits so long for it."""
STATUS_CALL_SECONDS = 2.0
"""A caller that shows the state of shards waits so long for them, and leaves out those that do not answer."""
REPEATED_CALL_SECONDS = 5.0
"""A caller that asks again and again waits so long for one answer."""
CALL_SECONDS = 10.0
"""A call to the coordinator, or from it, which is answered at once, is given up after this time."""
SHARD_CALL_SECONDS = 30.0
"""A call to a shard is given up after this time, beside the time for its bytes."""
CHECKPOINT_SECONDS = 3600.0
"""A shard may take so long to write or read its part of a checkpoint, and the coordinator for the whole."""

SLOWEST_BYTES_PER_SECOND = 10e6
"""No network and no disk is slower: time is given for bytes by this rate."""

REQUEST_SECONDS = 10.0
"""A client of an HTTP page has so long to send one request."""

# -- processes that are away, silent or slow

PATIENCE_SECONDS = 60.0
"""A process waits so long for another one that is away, or that neither sends nor takes a byte."""
LONG_PATIENCE_SECONDS = 600.0
"""A process waits so long for another one that has work to do first: to start, compile, upload values or save."""
MOVE_SECONDS = 60.0
"""Shards stay paused so long for a batch of a move without another call, and each part of it may take so long."""
QUIESCE_SECONDS = 10.0
"""A shard that is paused for a checkpoint or a restore resumes after so long without another call."""

BEATS_PER_LEASE = 4.0
"""A lease lasts at least so many heartbeats: one that is lost, or late, does not end it."""

REWATCH_SECONDS = 0.5
"""A stream of views that broke off is opened again after this pause."""
ASK_SECONDS = 2.0
"""The program that starts workers asks the coordinator at this interval whether more are wanted."""
TASK_ASK_SECONDS = 10.0
"""As ``ASK_SECONDS``, where every task of a job asks."""

SHORT_LIFE_SECONDS = 10.0
"""A process that ends sooner, again and again, is started again with a pause."""
LIFE_SECONDS = 1.0
"""A server that a program has started shows a sign of life at this interval."""
HANGS_SECONDS = 30.0
"""A server is taken to hang, and is ended, when it has shown no sign of life for so long."""
STARTS_SECONDS = 300.0
"""The same before its first sign of life: on a busy machine imports and a long journal take their time."""
JOINING_SECONDS = 300.0
"""A worker that was started may be about to join for so long; after that the coordinator's request for it counts."""

# -- the end

END_SECONDS = 2.0
"""A process that ends waits so long for those that are still connected, and a reader for shards that may have ended."""
FAREWELL_SECONDS = 60.0
"""A worker that has finished tries so long to tell the coordinator, and the coordinator waits so long for workers."""

# -- what is said and shown

HINT_SECONDS = 5.0
"""What a process waits for is logged, or sent, at this interval."""

# -- sessions

SESSION_SECONDS = 900.0
"""The coordinator's proof that a process is a member is valid for so long; heartbeats renew it."""
CLOCK_SECONDS = 60.0
"""The clocks of two machines may differ by so much."""
