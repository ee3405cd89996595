"""The folder of checkpoints is tried before a server serves, also before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ps_protocol.errors import ConfigError, StorageFull
from ps_server.checkpoint import files
from ps_server.checkpoint.files import check_writable
from ps_server.coordinator import main as coordinator
from ps_server.shard import main as shard

SHARD = ["--shard", "0", "--coordinator", "127.0.0.1:1"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.mark.parametrize(("program", "arguments"), [(coordinator, []), (shard, SHARD)])
def test_a_server_that_cannot_write_checkpoints_does_not_start(
    program: Any, arguments: list[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.grpc_server, "run", lambda serve: pytest.fail("it serves"))
    monkeypatch.setattr(shard, "serving", lambda: pytest.fail("it imports torch"))
    monkeypatch.setattr(shard, "tune_allocator", lambda: None)
    monkeypatch.setattr(program, "configure_logging", lambda *of: None)
    done = CliRunner().invoke(program.main, [*arguments, "--checkpoint-dir", str(file / "saved")])
    assert done.exit_code == 2, done.output
    assert "saved cannot be used: Not a directory" in done.output


def test_a_folder_that_is_only_read_need_not_be_writable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    monkeypatch.setattr(shard.grpc_server, "run", lambda serve: reached.append(serve))
    monkeypatch.setattr(shard, "serving", lambda: None)
    monkeypatch.setattr(shard, "tune_allocator", lambda: None)
    monkeypatch.setattr(shard, "configure_logging", lambda *of: None)
    done = CliRunner().invoke(shard.main, [*SHARD, "--restore-dir", str(file / "saved")])
    assert done.exit_code == 0, done.output
    assert reached


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_full_disk_and_a_read_only_one_are_typed_errors_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int) -> Any:
        def write(path: Path, data: bytes) -> None:
            path.touch()
            raise OSError(number, "refused")

        return write

    for number, error in ((28, StorageFull), (30, ConfigError)):
        monkeypatch.setattr(files, "write_file", fails(number))
        with pytest.raises(error):
            check_writable(tmp_path)
        assert list(tmp_path.iterdir()) == []
