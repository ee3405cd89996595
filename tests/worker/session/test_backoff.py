"""How long an attempt is repeated, and what is raised at the end of that time."""

from __future__ import annotations

import pytest

from ps_protocol.errors import NotReady, PsError, StorageFull, Unavailable
from ps_worker.session.backoff import Backoff
from tests.worker.fakes import job
from tests.worker.step.stepping import Worker


@pytest.mark.parametrize(
    ("met", "raised"), [(Unavailable, Unavailable), (NotReady, Unavailable), (StorageFull, StorageFull)]
)
def test_the_end_names_what_was_met(met: type[PsError], raised: type[PsError]) -> None:
    with pytest.raises(PsError, match=r"gave up after 0 seconds: no room.*shard: 1.*remedy: wait") as ended:
        Backoff(0.0).pause(met("no room", shard="1", remedy="wait"))
    assert type(ended.value) is raised


def test_a_worker_whose_first_values_find_no_room_waits_for_it() -> None:
    with job(shards=2) as session:
        worker = Worker(session)
        full = session.shards[1]
        full.faults.refuse_open = [StorageFull("no room")]
        worker.pipeline.start()
        assert not full.faults.refuse_open
        assert any("no room" in hint for hint in session.hints)
