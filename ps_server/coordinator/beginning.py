"""The initial state of a coordinator: empty, from a checkpoint, or from its journal."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.logs import EventLogger
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.coordinator import times
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.exchanges import Exchanges
from ps_server.coordinator.persistence.cluster_records import ClusterRecords, from_rows
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.persistence.saved_facts import saved_data, saved_phase
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.state import ClusterState

logger = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The parts that the driver owns, and the journal records they were restored from, if any."""

    state: ClusterState
    data: DataLeases
    exchanges: Exchanges
    records: ClusterRecords | None = None


def begin(settings: ClusterSettings, journal: Journal | None, saved: Checkpoint | None, now: float) -> Beginning:
    """Continue where ``journal`` ends; in a new job take phase and data positions from ``saved``.

    Raises InvalidRequest for a mode that cannot work, ConfigError for settings that contradict it, DamagedData.
    """
    records = from_rows(journal.read(), str(journal.path)) if journal else None
    if journal is None or records is None:
        state = ClusterState(settings, saved_phase(saved) if saved else 0)
        return Beginning(state, saved_data(saved) if saved else DataLeases(), Exchanges())
    state = ClusterState.restore(settings, records, now)
    state.membership.extend_leases(times.RESTART_SECONDS)
    view = state.view
    logger.info(
        "recovery", "continues from %s: revision %d, %d members", journal.path, view.revision, len(view.members)
    )
    return Beginning(state, DataLeases.restore(records.data), Exchanges.restore(records.exchanges), records)
