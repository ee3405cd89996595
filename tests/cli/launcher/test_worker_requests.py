"""ps-run reads what the engine of the coordinator writes, once. In this process, costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_protocol.errors import InvalidRequest
from ps_server.cli.launcher.worker_requests import WorkerRequests
from ps_server.coordinator.elasticity.engines.find import find_engine


def test_each_request_is_taken_once_also_of_a_coordinator_that_was_started_again(tmp_path: Path) -> None:
    requests = WorkerRequests(tmp_path)
    flag, text = requests.flags
    assert flag == "--engine"
    assert requests.take() == ()
    for ranks in ((2,), (2, 0), (2, 0)):
        find_engine(text, 8).request(4, ranks)
        assert requests.take() == ranks
        assert requests.take() == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ranks": 3}', '{"ranks": ["0"]}', '{"ranks": [true]}', "{"])
def test_what_is_no_request_is_refused_once(tmp_path: Path, text: str) -> None:
    requests = WorkerRequests(tmp_path)
    Path(requests.flags[1].removeprefix("file:")).write_text(text)
    with pytest.raises(InvalidRequest, match="a request for workers is not understood"):
        requests.take()
    assert requests.take() == ()
