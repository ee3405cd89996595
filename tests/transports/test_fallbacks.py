"""A transport that cannot be had: the next one is taken, training goes on, and the user is told."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from ps_protocol.cluster.answers import Outcome
from ps_protocol.errors import PsError
from ps_protocol.launch.ports import free_port
from ps_protocol.wire.shared_memory import SharedMemory
from ps_server.shard.config import ShardConfig, SideChannelConfig
from ps_server.shard.transport.side_channels import SideChannels
from tests.support.shards import wait_until
from tests.transports.support import (
    LARGE,
    Line,
    assert_same,
    begin,
    is_idle,
    leaves_no_descriptors,
    line,
    running_shard,
    trained,
    whole_numbers,
)
from tests.worker.jobs import running_job

pytestmark = pytest.mark.usefixtures("loop", "quiet")

NO_SHM = SideChannelConfig(shm=False)
NO_BULK = SideChannelConfig(ports=())
NEITHER = SideChannelConfig(shm=False, ports=())


@contextmanager
def trains_over(found: str, *asked: str, config: SideChannelConfig | None = None):
    """A shard whose workers ask for ``asked``, go over ``found``, and leave nothing behind."""
    with running_shard(side_channel_config=config) as shard:
        model, initial = begin(shard, *LARGE)
        yield shard
        with line(shard, model, "grpc") as warm:
            warm.exchange([None, None, None])
        step = whole_numbers(model, 1)
        with leaves_no_descriptors():
            worker = Line(shard, model, *asked)
            assert worker.transport == found
            worker.exchange(step)
            assert_same(worker.values, trained(initial, step))
            worker.close()
            worker.release()
        wait_until(lambda: is_idle(model))


@pytest.mark.parametrize(
    ("config", "found"), [(NO_SHM, "bulk"), (NO_BULK, "shm"), (NEITHER, "grpc")], ids=["no shm", "no bulk", "neither"]
)
def test_what_a_shard_does_not_have_is_passed_over(config, found):
    with trains_over(found, "shm", "bulk", config=config):
        pass


def test_who_asks_for_bulk_alone_does_not_get_shared_memory():
    with trains_over("bulk", "bulk"):
        pass


@pytest.mark.parametrize(("asked", "found"), [(("shm", "bulk"), "bulk"), (("shm",), "grpc")])
def test_a_shard_without_room_for_segments_is_used_over_the_next_transport(monkeypatch, asked, found):
    with trains_over(found, *asked):
        monkeypatch.setattr(SharedMemory, "create", no_memory)


def no_memory(size_bytes: int, **_: int) -> SharedMemory:
    raise OSError("no room")


def test_parameters_that_lie_in_memory_of_the_shards_own_are_sent_instead_of_lent(monkeypatch):
    with running_shard() as shard:
        with monkeypatch.context() as without:
            without.setattr(SharedMemory, "create", no_memory)
            model, initial = begin(shard, *LARGE)
        steps = [whole_numbers(model, seed) for seed in (1, 2)]
        with line(shard, model, "shm") as worker:
            for step in steps:
                assert worker.exchange(step).segment == 0
            assert_same(worker.values, trained(initial, *steps))
        wait_until(lambda: is_idle(model))


def test_a_worker_that_cannot_map_segments_goes_on_over_bulk(monkeypatch):
    def cannot(fd: int, *_: object, **__: object) -> SharedMemory:
        os.close(fd)
        raise ValueError("mmap length is greater than file size")

    with trains_over("bulk", "shm", "bulk"):
        monkeypatch.setattr(SharedMemory, "attach", cannot)


@pytest.mark.parametrize("port", [None, 1 << 16, (1 << 32) - 1], ids=["nobody listens", "no port", "a huge number"])
def test_a_port_that_cannot_be_reached_is_passed_over(monkeypatch, port):
    with trains_over("grpc", "bulk"):
        monkeypatch.setattr(SideChannels, "port", port or free_port())


@pytest.mark.parametrize("name", ["torch-ps-nobody", "x" * 500, "no\0name"], ids=["unknown", "too long", "odd"])
def test_a_unix_socket_that_cannot_be_reached_is_passed_over(monkeypatch, name):
    def offering(self, transport, token, layout):
        channel = offered(self, transport, token, layout)
        if channel is not None and channel.name:
            channel = replace(channel, name=name)
        return channel

    offered = SideChannels._channel
    with trains_over("bulk", "shm", "bulk"):
        monkeypatch.setattr(SideChannels, "_channel", offering)


def test_a_port_that_swallows_what_is_sent_to_it_costs_a_moment_and_is_passed_over(monkeypatch):
    monkeypatch.setattr("ps_worker.times.SIDE_CHANNEL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as swallowing, trains_over("grpc", "bulk"):
        monkeypatch.setattr(SideChannels, "port", swallowing.getsockname()[1])


def test_a_port_where_somebody_else_answers_is_passed_over(monkeypatch):
    """The health service of some other server, say: it speaks first, and in no words of ours."""
    with running_shard() as other, trains_over("grpc", "bulk"):
        monkeypatch.setattr(SideChannels, "port", int(other.address.rpartition(":")[2]))


@pytest.mark.parametrize(("transport", "asks"), [("grpc", True), ("bulk", False), ("shm", False)])
def test_only_a_worker_whose_payloads_go_over_grpc_keeps_the_memory_of_freed_chunks(monkeypatch, transport, asks):
    asked = []
    monkeypatch.setattr("ps_worker.transport.negotiate.keep_freed_memory", lambda: asked.append(transport))
    with running_shard() as shard:
        model, _ = begin(shard, (5,))
        with line(shard, model, transport):
            assert bool(asked) == asks


def test_a_stream_that_may_not_open_says_so_whatever_the_transport(transport):
    with running_shard() as shard:
        model, _ = begin(shard, *LARGE)
        with leaves_no_descriptors(), pytest.raises(PsError, match="worker 7"):
            Line(shard, model, transport, rank=7)


def test_a_stream_falls_back_each_time_it_is_opened(monkeypatch):
    with running_shard() as shard:
        model, _ = begin(shard, *LARGE)
        for attempt in range(3):
            with monkeypatch.context() as broken:
                if attempt == 1:
                    broken.setattr(SideChannels, "port", free_port())
                worker = Line(shard, model, "bulk")
                assert worker.transport == ("grpc" if attempt == 1 else "bulk")
                assert worker.exchange([None, None, None]).outcome == Outcome.APPLIED
                worker.close()


# What the user is told


@pytest.mark.parametrize(
    ("config", "asked", "found", "level"),
    [
        (NO_SHM, "shm", "bulk", logging.WARNING),
        (NEITHER, "shm", "grpc", logging.WARNING),
        (NO_BULK, "bulk", "grpc", logging.WARNING),
        (NEITHER, "auto", "grpc", logging.INFO),
        (None, "shm", "shm", logging.INFO),
        (NEITHER, "grpc", "grpc", logging.INFO),
    ],
)
def test_the_log_names_the_transport_and_warns_where_it_is_not_what_was_asked_for(
    monkeypatch, caplog, config, asked, found, level
):
    caplog.set_level(logging.INFO, "ps_worker")
    if config is not None:
        monkeypatch.setattr("tests.worker.jobs.ShardConfig", partial(ShardConfig, side_channels=config))
    with running_job(2, 1) as job, job.cluster(transport=asked) as cluster:
        parameter = torch.nn.Parameter(torch.zeros(100, 400))
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert parameter.eq(-2.0).all()
    told = [r for r in caplog.records if "steps use transport" in r.getMessage()]
    assert [(r.levelno, f"transport {found} (requested: {asked})" in r.getMessage()) for r in told] == [(level, True)]
