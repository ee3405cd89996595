"""What is wrong with a server's options is told before it imports torch, and before it serves."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ps_protocol.errors import ConfigError
from ps_server.cli.options import common
from ps_server.cli.options.common import check_descriptors, check_ready_file, clean_errors
from ps_server.coordinator import main as coordinator
from ps_server.shard import main as shard

SHARD = ["--shard", "0", "--coordinator", "127.0.0.1:1"]


@pytest.fixture
def _serves_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in (coordinator, shard):
        monkeypatch.setattr(program.grpc_server, "run", lambda serve: pytest.fail("it serves"))
        monkeypatch.setattr(program, "configure_logging", lambda *of: None)
    monkeypatch.setattr(shard, "serving", lambda: pytest.fail("it imports torch"))
    monkeypatch.setattr(shard, "tune_allocator", lambda: None)


@pytest.mark.usefixtures("_serves_not")
@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        (shard, [*SHARD, "--bind", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:0"),
        (shard, [*SHARD, "--bind", "192.0.2.1"], "cannot listen on 192.0.2.1:0"),
        (shard, [*SHARD, "--bind", "0.0.0.0"], "without"),
        (shard, [*SHARD, "--ready-file", "/nope/x"], "the ready file /nope/x cannot be written: No such file"),
        (shard, [*SHARD, "--tls-cert", "/nope/x", "--tls-key", "/nope/y", "--tls-ca", "/nope/z"], "/nope/"),
        (coordinator, ["--ready-file", "/nope/x"], "the ready file /nope/x cannot be written: No such file"),
        (coordinator, ["--shards", "5000"], "5000 is not in the range 1<=x<=4096"),
        (coordinator, ["--workers", "70000"], "expected 0 <= MIN <= MAX <= 65536"),
    ],
)
def test_a_server_that_cannot_serve_says_so_at_once(program: Any, arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(program.main, arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output


@pytest.mark.usefixtures("_serves_not")
@pytest.mark.parametrize(("program", "arguments"), [(coordinator, []), (shard, SHARD)])
def test_a_server_that_may_open_too_few_files_says_how_many_it_needs(
    program: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (24, 24))
    done = CliRunner().invoke(program.main, arguments)
    assert done.exit_code == 2, done.output
    assert "expected: 64 or more; actual: a limit of 24; remedy: raise the limit (ulimit -n 64" in done.output


def test_a_lower_limit_that_may_be_raised_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: told.append(limits))
    for limits, expected in (((24, 100), [(80, 100)]), ((90, 100), []), ((24, resource.RLIM_INFINITY), [(80, -1)])):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        told.clear()
        check_descriptors(80, "this")
        assert told == expected
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (24, 79))
    with pytest.raises(ConfigError):
        check_descriptors(80, "this")


def test_a_ready_file_is_one_in_a_folder_that_can_be_written_or_a_pipe(tmp_path: Path) -> None:
    check_ready_file(None)
    check_ready_file(tmp_path / "ready")
    os.mkfifo(tmp_path / "pipe")
    check_ready_file(tmp_path / "pipe")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    for path in (tmp_path, tmp_path / "pipe" / "x", Path("/nope/x"), Path("/dev/full")):
        with pytest.raises(ConfigError, match=r"the ready file .* cannot be written"):
            check_ready_file(path)


def test_too_many_open_files_are_one_error_and_other_errors_of_the_system_stay_what_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "logs_json", lambda: False)
    with pytest.raises(SystemExit) as ended, clean_errors():
        raise OSError(errno.EMFILE, "Too many open files", "/proc/self/stat")
    assert ended.value.code == 1
    assert "Error: too many files are open here" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), clean_errors():
        raise FileNotFoundError(errno.ENOENT, "No such file", "/x")
