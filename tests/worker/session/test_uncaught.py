"""What a script prints that ends with an error of torch-ps: its own lines, the message, and nothing of how it came."""

import subprocess
import sys

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import Unavailable
from ps_protocol.launch.ports import free_port
from ps_worker.session import uncaught
from tests.support import interpreters

SCRIPT = """
import sys
import ps_worker

def train():
    return ps_worker.connect("127.0.0.1:{port}", connect_timeout_seconds=0.1)

train()
"""


@pytest.fixture
def path(tmp_path):
    """Where the script is."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(port=free_port()))
    return str(path)


def test_a_script_that_ends_with_our_error_shows_its_own_lines_and_the_message_once(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = done.stderr
    lines = said.splitlines()
    assert lines[0].startswith("Traceback (most recent call last; PS_TRACEBACK=full shows")
    assert [line for line in lines if line.startswith("  File ")] == [
        f'  File "{path}", line 8, in <module>',
        f'  File "{path}", line 6, in train',
    ]
    assert lines[-1].startswith("ps_protocol.errors.Unavailable: the coordinator at 127.0.0.1:")
    assert "nothing listens on port" in lines[-1]
    assert "remedy: start it there" in lines[-1]
    assert said.count("Traceback") == 1


def test_the_whole_chain_is_there_for_who_asks(path):
    done = interpreters.run(path, PS_TRACEBACK="full")
    assert done.returncode == 1
    assert "client/coordinator.py" in done.stderr


def test_it_is_not_there_for_who_does_not(path):
    done = interpreters.run(path)
    assert done.returncode == 1
    assert f'File "{path}", line 8, in <module>' in done.stderr
    assert "client/coordinator.py" not in done.stderr


def test_other_errors_and_other_hooks_are_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    uncaught.install()
    sys.excepthook(ValueError, ValueError("mine"), None)
    assert capsys.readouterr().err == "ValueError: mine\n"
    own = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", own)
    uncaught.install()
    assert sys.excepthook is own


def test_notes_on_an_error_are_shown():
    error = Unavailable("gone")
    error.add_note("in step 12")
    assert uncaught.shown(error, None).endswith("Unavailable: gone\nin step 12\n")


def test_a_call_that_fails_has_one_error_before_it_at_most():
    with CoordinatorClient(f"127.0.0.1:{free_port()}") as client, pytest.raises(Unavailable) as caught:
        client.wait_until_reachable(0.1)
    assert caught.value.__cause__ is None
