"""What a worker and a shard tell each other when a stream opens: pushes that were acknowledged, versions of torch."""

from __future__ import annotations

import shutil

import grpc
import pytest
import torch

from ps_protocol.errors import StateLost
from ps_server.consistency import WorkerKey
from ps_server.shard.access import OpenChecks
from tests.shard.disks import shard_on
from tests.support.shards import StubStream, error_of, flat, gradients, start

pytestmark = pytest.mark.usefixtures("disk")
WORKER = WorkerKey(3, 7)


def test_a_worker_that_was_told_more_than_is_known_is_refused_where_durability_promised_it(caplog):
    checks = OpenChecks(1, lambda: True)
    checks.acknowledged("m", WORKER, 0, 0)
    checks.acknowledged("m", WORKER, 5, 6)
    with pytest.raises(StateLost, match=r"expected: push 6, which the worker was told.*actual: push 5 is the last"):
        checks.acknowledged("m", WORKER, 6, 5)
    assert "shard 1 has lost pushes of worker 3 to model 'm'" in caplog.text


def test_where_durability_allows_the_loss_it_is_said(caplog):
    OpenChecks(1, lambda: False).acknowledged("m", WORKER, 6, 5)
    assert "push 6 of worker 3 to model 'm' was acknowledged, and the last that is known is 5" in caplog.text


def test_a_worker_with_another_torch_is_spoken_of_once(caplog):
    checks = OpenChecks(1, lambda: False)
    for version in ("", torch.__version__, "1.0", "1.0"):
        checks.torch_version(WORKER, version)
    assert caplog.text.count("install the same version on both") == 1
    assert f"with torch {torch.__version__}, and worker 3 computes gradients with torch '1.0'" in caplog.text
    checks.torch_version(WORKER, "\x1b[31m" + "2" * 1000)
    assert "\x1b" not in caplog.text
    assert len(caplog.records[-1].getMessage()) < 300


def test_a_restarted_shard_whose_log_lost_an_acknowledged_push_refuses_its_worker(tmp_path, killed):
    with shard_on(tmp_path / "a") as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        for seed in range(3):
            stream.exchange(flat(model.layout, *gradients(model, seed)))
        assert stream.opened.torch_version == torch.__version__
        with killed(shard) as again:
            again.place(model.layout.shard_map)
            StubStream(again, acknowledged=3).end()
            with pytest.raises(grpc.RpcError) as refused:
                StubStream(again, acknowledged=4)
            error = error_of(refused.value)
            assert isinstance(error, StateLost)
            assert (error.expected, error.actual) == (
                "push 4, which the worker was told had been applied",
                "push 3 is the last that is known",
            )
        stream.end()
    shutil.rmtree(tmp_path / "killed")
