"""A journal of format 2, whose models had their options as JSON text, is read and goes on as format 3."""

import sqlite3
import tarfile
from dataclasses import replace
from pathlib import Path

from ps_protocol.model.spec import Consistency, Mode, Option
from ps_server.coordinator.persistence.cluster_records import ClusterRecords, changed_rows, from_rows
from ps_server.coordinator.persistence.journal import FILE_NAME, FORMAT, Journal
from tests.coordinator.cluster import SPEC, Cluster
from tests.coordinator.tables import model, table

FOLDER = Path(__file__).with_name("journal_of_format_2.tar.xz")

GROUPS: tuple[dict[str, Option], ...] = (
    {"lr": 0.1, "betas": [0.5, 0.75], "eps": 1e-8, "amsgrad": True, "foreach": None, "weight_decay": 0},
    {"lr": 1, "betas": [0.25, 0.5], "eps": 1e-8, "amsgrad": False, "maximize": True},
)


def records() -> ClusterRecords:
    """Two models: groups with options of every shape, and tables."""
    c = Cluster()
    c.shard()
    worker = c.worker()
    variables = (SPEC.variables[0], replace(SPEC.variables[1], group=1), SPEC.variables[2])
    c.declare(worker, replace(SPEC, optimizer="torch.optim.Adam", variables=variables, group_options=GROUPS))
    c.declare(worker, model(table(), table("words", optimizer="ftrl"), name="rows", rows=5))
    made = c.state.persisted_state()
    places = {
        place: replace(each, application=replace(each.application, protocol_version=5))
        for place, each in made.membership.places.items()
    }
    # Who used which model was not written then.
    return replace(made, membership=replace(made.membership, places=places), uses=None)


def write(folder: Path) -> None:
    with Journal.open(folder) as journal:
        journal.write(changed_rows(None, records()))


def test_its_models_are_what_they_were(tmp_path: Path) -> None:
    with tarfile.open(FOLDER) as archive:
        archive.extractall(tmp_path, filter="data")
    kept = records()
    with Journal.open(tmp_path) as journal:
        assert from_rows(journal.read(), "here") == kept
        later = replace(kept, consistency=Consistency(Mode.SYNC))
        journal.write(changed_rows(kept, later))
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    connection.close()
    # A map's row is written again when it changes, so texts and messages are in one journal.
    with Journal.open(tmp_path) as journal:
        later = replace(later, uses={})  # the row of the cluster is of this version now
        assert from_rows(journal.read(), "here") == later
        moved = {name: replace(each, epoch=each.epoch + 1) for name, each in kept.maps.items() if name == "rows"}
        last = replace(later, maps={**later.maps, **moved})
        journal.write(changed_rows(later, last))
    with Journal.open(tmp_path) as journal:
        assert from_rows(journal.read(), "here") == last
