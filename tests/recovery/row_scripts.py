"""What worker processes do with tables: a ledger in rows, which counts each push, and a table that always evicts."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import torch

from ps_protocol.model.tables import Ids
from tests.recovery.scripts import Work, say

MOST_ROWS = 1024
"""How many rows the table that evicts may have."""

ALWAYS = tuple(range(-8, 0))
"""Ids of every step."""


def ids_of(step: int, rows: int) -> Ids:
    """The ids of one step: the same few, and ``rows`` new ones."""
    return np.concatenate([np.array(ALWAYS, np.int64), np.arange(step * rows, (step + 1) * rows)])


def all_ids(steps: int, rows: int) -> Ids:
    """Every id once."""
    return np.concatenate([np.array(ALWAYS, np.int64), np.arange(steps * rows)])


def digest_of(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows, np.float32).tobytes()).hexdigest()


def work(told: Work) -> None:
    """A worker process. When told to, it says how often each row was updated, and a digest of those that may go."""
    import ps_worker
    from ps_worker import rows

    with ps_worker.connect(transport=told.transport, device="cpu", reconnect_timeout_seconds=60) as cluster:
        ledger = cluster.embedding(1, name="ledger", optimizer=rows.SGD(lr=1.0), init=rows.Constant(0.0))
        recent = cluster.embedding(
            4, name="recent", optimizer=rows.RowWiseAdagrad(lr=0.1), max_rows=MOST_ROWS, eviction="lru"
        )
        torch.manual_seed(0)
        top = torch.nn.Linear(4, 1)
        model = torch.nn.ModuleList([ledger, recent, top])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, name="model")
        say("started", optimizer.version)
        for step in range(optimizer.version, told.steps):
            ids = torch.from_numpy(ids_of(step, told.rows))
            # A gradient of -1 for each of the ledger's rows; the others' depend on what they are.
            (top(recent(ids)).square().mean() - ledger(ids).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            say("step", step + 1)
            if step + 1 in told.pauses:
                sys.stdin.readline()
        say("stays")
        sys.stdin.readline()
        with torch.no_grad():
            ids = torch.from_numpy(all_ids(told.steps, told.rows))
            say("ledger", json.dumps(ledger(ids).flatten().tolist()))
            say("digest", digest_of(recent(ids).numpy()))
