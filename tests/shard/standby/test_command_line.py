"""What ps-server says of a standby that cannot be."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ps_server.log.folder import DataFolder
from ps_server.shard.main import main

PLACE = ["--shard", "1", "--coordinator", "127.0.0.1:1"]


@pytest.mark.parametrize("asked", [["--standby"], ["--acknowledge", "after"]])
@pytest.mark.parametrize("kept", [[], ["--durability", "snapshot"]])
def test_a_standby_needs_a_log_on_disk(asked, kept, tmp_path):
    data = ["--data-dir", str(tmp_path)] if kept else []
    found = CliRunner().invoke(main, [*PLACE, *asked, *kept, *data])
    assert found.exit_code == 2
    assert "a standby follows a log on disk" in found.output
    assert "give --data-dir" in found.output


def test_a_standby_with_the_directory_of_another_shard_is_refused_and_nothing_is_changed(tmp_path):
    folder = DataFolder.open(tmp_path, 0)
    folder.belongs_to(3)
    folder.close()
    folder.path.rename(tmp_path / "shard-1")
    before = (tmp_path / "shard-1" / "shard.json").read_bytes()
    found = CliRunner().invoke(main, [*PLACE, "--standby", "--data-dir", str(tmp_path)])
    assert found.exit_code == 1
    assert "holds the data of another shard; shard: 1; expected: shard 1; actual: shard 0" in found.output
    assert (tmp_path / "shard-1" / "shard.json").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--coordinator", "foo"], "it has no port"),
        (["--coordinator", "http://foo:1"], "it begins with a scheme"),
        (["--coordinator", "a:1", "--advertise", "foo"], "this shard's address is not host:port"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_waited_for(given, says):
    found = CliRunner().invoke(main, ["--shard", "1", *given])
    assert found.exit_code == 2
    assert says in found.output
