"""Whatever happens to one file of a journal, it says what was written last, or that it does not."""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError, DamagedData
from ps_server.coordinator.persistence import journal as journals
from ps_server.coordinator.persistence.journal import FILE_NAME, Journal
from ps_server.coordinator.persistence.lineage import WITNESS_NAME
from tests.support.seeds import drawn_seed

WAL = FILE_NAME + "-wal"
COMMITS = 12
TRIALS = 60
LAST = {"a": b"%d" % (COMMITS - 1), **{f"place/{number}": b"member" * 50 for number in range(COMMITS)}}


def write_some(journal: Journal, commits: int = COMMITS) -> None:
    for number in range(commits):
        journal.write({"a": b"%d" % number, f"place/{number}": b"member" * 50})


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files as ``kill -9`` leaves them: some commits in the main file, the last ones in the write-ahead log."""
    live, dead = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("dead")
    with pytest.MonkeyPatch.context() as patch, Journal.open(live) as journal:
        patch.setattr(journals, "CHECKPOINT_PAGES", 10_000)
        write_some(journal, 4)
        journal._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        write_some(journal)
        for file in live.iterdir():
            shutil.copy(file, dead)
    return dead


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "journal"))


def read(folder: Path) -> dict[str, bytes]:
    with Journal.open(folder) as journal:
        return journal.read()


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place % len(data)] ^= 1 << place % 8
    file.write_bytes(data)


def test_files_as_a_kill_leaves_them_hold_every_commit(folder: Path) -> None:
    assert (folder / WAL).stat().st_size > 20_000
    assert read(folder) == LAST
    assert read(folder) == LAST


def test_a_journal_whose_write_ahead_log_was_damaged_is_refused_and_left_as_it_was(folder: Path) -> None:
    flip(folder / WAL, 9_000)
    before = (folder / WAL).read_bytes()
    for _ in range(2):
        with pytest.raises(DamagedData, match=r"older than what was on disk.*lacks.*commits.*--accept-older") as caught:
            read(folder)
        assert FILE_NAME in caught.value.message
        assert "write-ahead log" in caught.value.remedy
    assert (folder / WAL).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "said", "other"),
    [(WAL, "older than what was on disk", FILE_NAME), (FILE_NAME, "not a whole journal", WAL)],
)
def test_a_file_removed_is_a_refusal_and_the_other_stays(folder: Path, name: str, said: str, other: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DamagedData, match=said):
        read(folder)
    assert (folder / other).exists()


def test_one_damage_anywhere_gives_all_commits_or_a_refusal(killed: Path, tmp_path: Path) -> None:
    seed = drawn_seed()
    rng = random.Random(seed)
    refused = 0
    for trial in range(TRIALS):
        folder = Path(shutil.copytree(killed, tmp_path / str(trial)))
        file = rng.choice(sorted(folder.iterdir()))
        match rng.randrange(4):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
            case _:
                flip(file, rng.randrange(file.stat().st_size))
        try:
            outcome = read(folder)
        except (DamagedData, ConfigError) as error:
            refused += str(folder) in str(error)
        else:
            assert outcome == LAST, (seed, trial, file)
        shutil.rmtree(folder)
    assert refused


def test_damage_that_sqlite_quotes_in_a_message_is_damage(killed: Path, tmp_path: Path) -> None:
    schema = b"CREATE TABLE kept (key"
    whole = (killed / FILE_NAME).read_bytes()
    begin = whole.index(schema)
    for place in range(begin, begin + len(schema)):
        folder = Path(shutil.copytree(killed, tmp_path / str(place)))
        data = bytearray(whole)
        data[place] ^= 0x80  # no UTF-8 any more
        (folder / FILE_NAME).write_bytes(data)
        with pytest.raises(DamagedData, match="not a whole journal"):
            read(folder)


def test_a_row_that_vanished_is_noticed(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        write_some(journal)
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    with connection:
        connection.execute("DELETE FROM kept WHERE key = 'place/3'")
    connection.close()
    with pytest.raises(DamagedData, match="a row is missing"):
        read(tmp_path)


def test_a_lost_witness_costs_nothing_and_is_made_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / WITNESS_NAME).unlink()
    with Journal.open(folder) as journal:
        assert journal.read() == LAST
        journal.write({"a": b"later"})
    assert "knows the last commit" in caplog.text
    assert (folder / WITNESS_NAME).exists()


def test_a_witness_that_nobody_can_read_is_named(folder: Path) -> None:
    (folder / WITNESS_NAME).write_bytes(bytes(1024))
    with pytest.raises(DamagedData, match=r"coordinator\.commit.*remove this file"):
        read(folder)


def test_a_witness_of_another_journal_is_refused(folder: Path, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "other") as other:
        other.write({"a": b"1"})
    shutil.copy(tmp_path / "other" / WITNESS_NAME, folder)
    with pytest.raises(DamagedData, match="another journal"):
        read(folder)


def test_what_is_missing_may_be_accepted_and_is_forgotten_then(folder: Path) -> None:
    with Journal.open(folder) as journal:
        newest = journal.mark
        shutil.copytree(folder, folder.parent / "copy")
        journal.write({"a": b"lost"})
        lost = journal.mark
    shutil.copy(folder / WITNESS_NAME, folder.parent / "copy")
    copy = folder.parent / "copy"
    with pytest.raises(DamagedData, match="older"):
        read(copy)
    with Journal.open(copy, accept_older=True) as journal:
        assert journal.read() == LAST
        journal.check_mark(lost)
        journal.write({"a": b"on"})
    with Journal.open(copy) as journal:
        assert journal.read()["a"] == b"on"
        for mark in (newest, lost):
            journal.check_mark(mark)


def test_an_older_copy_of_the_whole_folder_is_shown_by_a_mark(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    with Journal.open(folder) as journal:
        journal.check_mark(journal.mark)
        journal.write({"a": b"one more"})
        lost = journal.mark
    with Journal.open(copy) as journal:
        with pytest.raises(DamagedData, match=r"older.*a member received the mark of commit"):
            journal.check_mark(lost)
        for number in range(5):
            # Its own commits have taken the number by now.
            journal.write({"a": b"%d" % number})
        with pytest.raises(DamagedData, match="has a different history"):
            journal.check_mark(lost)
        journal.check_mark(journal.mark)


def test_a_mark_that_was_changed_or_is_of_another_journal_proves_nothing(folder: Path, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "other") as other:
        other.write({"a": b"1"})
        foreign = other.mark
    with Journal.open(folder) as journal:
        mark = journal.mark
        later = bytearray(mark)
        later[16] += 1
        for odd in (b"", b"short", foreign, bytes(later), bytes(len(mark)), mark + b"more"):
            journal.check_mark(odd)


def test_the_write_ahead_log_stays_short_and_ends_with_the_journal(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        write_some(journal, 400)
        assert (tmp_path / WAL).stat().st_size < 2 * journals.CHECKPOINT_PAGES * 4096
    assert not (tmp_path / WAL).exists()
