"""The events of log records: one name for each kind of message that a program acts on or counts. Pure.

A message has the event of the line below that has its beginning, unless its call names one. A new message gets a line
here; a test fails until it has one. docs/logs.md has the table.
"""

from __future__ import annotations

import logging
from types import MappingProxyType

from ps_protocol.errors import PsError

OTHER, DEBUG, ERROR = "other", "debug", "error"
"""Of records of other libraries; of messages of level debug; of an exception that is no PsError."""

KEY_CHARACTERS = 40
"""Messages are told apart by so many characters of their beginning, before values are filled in."""

EVENTS = MappingProxyType(
    {
        # What a call names itself.
        "cluster.change": "a member joined or left, the mode or the shard map changed",
        "cluster.loss": "a member failed or its lease ended",
        "elasticity": "the coordinator notices slow or lost workers or busy shards, and what it does about it",
        "barrier.released": "workers that were lost no longer hold up a barrier",
        "uncaught": "an exception ends the process",
        "job": "ps-run: what it does, and what ended",
        "status": "ps-run: the progress of the job, on changes and once a minute",
        "trace": "ps-run: where the trace is",
        "metrics": "ps-run: where Prometheus finds every process of the job",
        "output": "ps-run: a line that a script or process printed",
        "psctl.note": "psctl: progress, or why the answer is no",
        # By their beginning.
        "server.started": "a server serves, follows or shows metrics or a page, at an address",
        "server.stopping": "a server stops: a signal, the end of the job",
        "server.insecure": "a server listens beyond loopback without TLS or tokens",
        "server.unguarded": "connections cannot be limited: the process cannot read /proc/self/net/tcp",
        "server.stood_still": "a process was suspended or starved",
        "server.stuck": "a piece of work takes too long and ends the shard",
        "standby": "a standby begins to follow, waits, or is complete",
        "standby.failed": "a standby cannot follow, or the coordinator cannot be told of it",
        "recovery": "a coordinator or shard continues from its data directory",
        "recovery.cut": "something on the disk was damaged or not whole, and was cut off or set aside",
        "recovery.lost": "an acknowledged push is lost, as this durability allows",
        "journal.failed": "the coordinator's journal cannot be written for now",
        "history": "the page's curves and events could not be kept or read",
        "snapshot": "a snapshot was written, or begins again",
        "snapshot.failed": "a snapshot could not be written",
        "checkpoint": "a checkpoint was written, restored or left out",
        "checkpoint.failed": "a checkpoint could not be written",
        "move": "slices have moved between shards",
        "move.failed": "a move waits, was cancelled or given up",
        "model.placed": "a shard serves its part of a model",
        "model.released": "a shard has dropped a model that was released, or cannot log it yet",
        "model.waits": "a shard cannot serve its part of a model yet",
        "model.stopped": "a model cannot go on: an update or a move failed",
        "model.options": "workers or settings of a model contradict each other",
        "step.skipped": "an update raised and was skipped",
        "step.cut": "a worker leaves before the end of its last step, or without one",
        "leases": "leased data is given back only when a worker leaves",
        "transport": "a worker uses a transport, or cannot use one",
        "caller.refused": "a call, connection or process was refused",
        "request.failed": "a defect in a server, with its traceback",
        "files.read": "certificates or tokens were read again",
        "files.refused": "changed certificates or tokens were not taken",
        "files.expire": "a certificate of the process is in the last tenth of its time, or has expired",
        "coordinator.silent": "a member or the page cannot reach the coordinator, or does again",
        "waiting": "a process waits for another at its start",
        "alive.failed": "the file for liveness probes (`PS_ALIVE_FILE`) cannot be written",
        "table.waits": "rows of a table stay longer than asked",
        "versions": "two processes use different versions of torch",
        "compiling": "code for tables is compiled",
        "report": "TensorBoard files or traces lack something",
        "ray.restart": "a server or worker in a Ray cluster was lost and is started again",
        "ray.hanging": "a process in a Ray cluster hangs: it is killed, or cannot be",
        "ray.scaled": "RayCluster starts or ends a worker, because the job was scaled",
        DEBUG: "a message of level debug",
        ERROR: "an exception of Python; the classes of torch-ps are events of their own ([errors.md](errors.md))",
        OTHER: "a message of another library",
    }
)
"""Names, and what they mean."""

_BEGINNINGS = {
    "ray.restart": ("RayCluster: %s; starting it again in %g s (restart",),
    "ray.hanging": (
        "RayCluster: the actor of worker %d lives and is lost to the coordinator; it is killed",
        "RayCluster: worker %d is lost to the coordinator; all %d restarts are used",
        "RayCluster: %s hangs: the coordinator has lost it, for %s; it is killed",
        "RayCluster: processes that hang are not noticed: %s",
    ),
    "ray.scaled": (
        "RayCluster: worker %d is ended: the job is to have fewer",
        "RayCluster: worker %d is started: the job is to have more",
    ),
    "server.started": (
        "coordinator serves at %s: %d shards, %s workers, %s",
        "shard %d serves on %s",
        "page at %s",
        "metrics at %s",
        "%s: metrics at %s",
    ),
    "server.stopping": ("%s: stopping", "the job is finished: stopping"),
    "server.unguarded": ("connections of one host are not limited here: %s",),
    "server.insecure": ("%s listens on %s without %s: everybody who reaches it",),
    "server.stood_still": (
        "stood still for %.1f s: all leases are extended",
        "most heartbeats are late here: leases la",
    ),
    "standby": (
        "the standby %s",
        "shard %d: follows %s from record %d",
        "shard %d: its standby follows from record %d",
        "shard %d: copies %d models to its standby",
        "shard %d stands by: %s",
    ),
    "standby.failed": (
        "shard %d starts over as a standby: %s",
        "shard %d is not followed: %s",
        "the coordinator cannot be told of the standby yet: %s",
        "the coordinator was not told of the standby: %s",
    ),
    "recovery": (
        "continues from %s: revision %d, %d members",
        "shard %d: restored %d models from %s and %d records",
        "shard %d: replaying its log, at record %d",
        "a step of model '%s' raised in a replay, which",
        "shard %d: record %d of its log: %s",
        "shard %d: the last %d records were applied with torch",
    ),
    "recovery.cut": (
        "shard %d: record %d is not whole and is cut off",
        "%s. The machine was started again since, and there",
        "what %s held is set aside in %s",
        "%s is missing, which knows the last commit: made again",
    ),
    "recovery.lost": ("shard %d: push %d of worker %d to model '%s' was",),
    "journal.failed": (
        "nothing new is told until the journal can be written: %s",
        "cannot note the last commit in %s: %s",
    ),
    "history": (
        "the history cannot be kept in %s: %s",
        "the history in %s is left out, and begins again: %s",
    ),
    "snapshot": ("shard %d: snapshot of %.1f MB in %.1f s", "shard %d: a snapshot begins again, for a model"),
    "snapshot.failed": ("shard %d: no snapshot: %s", "no snapshot at the end, the log has everything: %s"),
    "checkpoint": (
        "checkpoint %s: %.1f MB in %.1f s",
        "restored %s into the running job",
        "no checkpoint in %s yet: the job starts without one",
        "model '%s': restored from %s",
    ),
    "checkpoint.failed": ("no checkpoint: %s",),
    "move": (
        "shard %d: %.1f MB came for the next shard maps",
        "model '%s': slices have moved to other shards",
    ),
    "move.failed": (
        "not every shard has confirmed yet that it serves by the new shard map",
        "a move of slices was cancelled",
        "a move of slices was given up: %s",
        "slices could not be moved yet: %s",
        "room for slices could not be made ahead of a move: %s",
        "shard %d resumes: the quiesce was not completed",
    ),
    "model.placed": ("model '%s': %d slices, %.1f MB, %s, %s",),
    "model.released": (
        "model '%s' is released: this shard has dropped it",
        "the release of model '%s' cannot be logged yet: %s",
    ),
    "model.waits": (
        "model '%s' cannot be placed here yet: %s",
        "model '%s' waits for the gradient norm of shard %d: %s",
    ),
    "model.stopped": (
        "model '%s' cannot be placed here",
        "model '%s' stopped: it could not be resharded",
        "model '%s' stopped: an update failed",
    ),
    "model.options": (
        "the job stays in mode %s; --mode %s is ignored",
        "model '%s': worker %d pushes %s=%s in %s %d, and",
        "model '%s': in sync a step is made with the options",
        "model '%s' has been trained already: '%s' and",
        "model '%s' has been trained already: the shards keep",
        "model '%s': '%s'%s was set on rank %d before %s, and",
        "model '%s': values are set here, and worker %d has",
        "model '%s' goes on: this process trained it before,",
        "model '%s': '%s' was set on rank %d after its last",
        "model '%s': '%s' was set after the last step: this",
        "model '%s': '%s' was written to since the last step",
        "training changes the buffers %s%s, which belong to",
        "model '%s': forward writes the buffers %s%s: each",
        "gradients change after backward: they are not sent",
        "clip_grad_norm_ clips the gradients of each worker",
        "workers evaluate different parameters: '%s' was set",
        "'%s' stays as it is: its weight is also used by a",
        "the first items of the %s are others on rank %d: it",
    ),
    "step.skipped": ("shard %d, model '%s': %s (%d so far)",),
    "step.cut": (
        "SIGTERM: this worker leaves in the middle of",
        "this worker leaves without the end of its last",
        "worker %d leaves without a step: the script never",
    ),
    "leases": ("leases on '%s' are given back when this worker",),
    "transport": (
        "model '%s': %s uses %s",
        "%s: transport %s cannot be used: %s",
        "%s: steps use transport %s (requested: %s)",
    ),
    "caller.refused": (
        "refused %s of %s: %s",
        "refused a malformed request of %s: %s",
        "refused another process: %s",
        "refused a side channel: %s",
        "cannot take a connection: %s",
        "closed a connection of %s: %s",
        "ended a stream of %s: %s",
    ),
    "request.failed": (
        "a request failed",
        "a side channel failed",
        "a subscriber failed",
        "the statistics of %s could not be read",
        "the page has ended; the job goes on without it",
    ),
    "files.read": ("read again: %s",),
    "files.refused": ("the change of %s is not taken, what was read",),
    "files.expire": ("a certificate expires soon: %s, on %s; n", "a certificate has expired: %s, on %s; co"),
    "coordinator.silent": (
        "the coordinator does not answer its page",
        "the coordinator at %s answers %s again",
        "%s keeps the last view of the cluster: %s",
        "%s could not report that it leaves: %s",
        "%s has finished, and waits up to %.0f s for the coordinator",
    ),
    "alive.failed": ("the file for liveness probes cannot be written: %s",),
    "table.waits": ("rows of model '%s' stay for now: %s",),
    "versions": (
        "shard %d applies updates with torch %s, and",
        "%s applies updates with torch %s, and this worker",
    ),
    "compiling": (
        "compiling what tables need: up to half a minute, once",
        "what tables need is compiled by each process, up to",
    ),
    "report": (
        "TensorBoard lacks %d calls of cluster.report(), which",
        "TensorBoard's event files end here: %s",
        "spans go nowhere: this process has no OpenTelemetry",
        "the trace file %s is full, and the oldest steps are dropped",
        "the trace ends here: %s cannot be written: %s",
    ),
}

BY_BEGINNING = MappingProxyType(
    {text[:KEY_CHARACTERS]: event for event, texts in _BEGINNINGS.items() for text in texts}
)
"""Events by the beginnings of messages."""


def event_of(record: logging.LogRecord) -> str:
    """The event of ``record``: one of EVENTS, or the class of a PsError."""
    named = getattr(record, "event", None)
    if named is not None:
        return str(named) if named in EVENTS else OTHER
    if record.msg == "%s" and isinstance(record.args, tuple) and isinstance(record.args[0], Exception):
        error = record.args[0]
        return type(error).__name__ if isinstance(error, PsError) else ERROR
    known = BY_BEGINNING.get(str(record.msg)[:KEY_CHARACTERS])
    return known or (DEBUG if record.levelno <= logging.DEBUG else OTHER)


def events_table() -> str:
    """The events as the documentation shows them, in Markdown."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in EVENTS.items()]
    return "\n".join(["| event | a record says that |", "|---|---|", *rows]) + "\n"
