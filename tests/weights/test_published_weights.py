"""Publishing and subscribing through a real coordinator, real shards and real workers in this process."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ps_worker
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.answers import SideChannel
from ps_protocol.cluster.view import Member, Role
from ps_protocol.cluster.weights import PublishAsk
from ps_protocol.errors import (
    ConfigError,
    DamagedData,
    InvalidRequest,
    ModelMismatch,
    StorageFull,
    Unavailable,
    UnknownVersion,
    VersionGone,
)
from ps_protocol.launch.ports import free_port
from ps_protocol.security.roles import AccessRole
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.weights import pieces
from ps_protocol.weights.reader import VersionReader
from ps_protocol.weights.version import WholeVersion
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.cli.psctl import main
from ps_server.shard import quiesce, weights
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.weights import HeldWeights
from ps_worker import admin
from ps_worker.weights import Subscription
from tests.support.certificates import made_folder
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job


class Odd(nn.Module):
    """Tied, 0-d, empty and non-contiguous parameters, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(8, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.bfloat = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self) -> torch.Tensor:
        parts = [
            self.first.weight.sum(),
            self.scale,
            self.turned.sum(),
            self.bfloat.float().sum(),
            self.first.bias.sum(),
        ]
        return torch.stack(parts).sum() + self.second.bias.sum()


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3), nn.BatchNorm1d(3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in state(model).items()
    }


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}


@contextmanager
def reader(job: Job, name: str = "policy", have: int | None = None, **options: Any) -> Iterator[Subscription]:
    options = {"coordinator": job.address, "reconnect_timeout_seconds": 60.0, **options}
    with ps_worker.subscribe(name, have, **options) as subscription:
        yield subscription


def test_ctrl_c_leaves_no_model_with_parts_of_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values are copied in one call, so that it comes before or after it."""

    def interrupted(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        copied.append((len(targets), len(values)))
        raise KeyboardInterrupt

    copied: list[tuple[int, int]] = []
    with running_job() as job, reader(job) as versions:
        model, mine = net(), net(2)
        cluster = job.cluster()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        cluster.publish("policy", optimizer, step=0, wait=True)
        version, before = next(versions), bits(mine)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", interrupted)
            with pytest.raises(KeyboardInterrupt):
                version.apply_(mine)
        assert bits(mine) == before
        assert copied == [(len(version.tensors()),) * 2]
        version.apply_(mine)
        assert bits(mine) == bits(model)


def test_a_reader_has_what_was_published_bit_by_bit_first_whole_then_as_what_changed() -> None:
    with running_job(shards=2) as job, reader(job) as versions:
        model, mine = net(), net(2)
        cluster = job.cluster()
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=1e-3)
        for number in range(1, 4):
            step(model, optimizer)
            at = np.int64(10 * number)
            assert cluster.publish("policy", optimizer, step=at, metadata={"loss": 0.5}, wait=True) == number
            version = next(versions)
            version.apply_(mine)
            assert (version.number, version.step, version.metadata) == (number, 10 * number, {"loss": 0.5})
            assert bits(mine) == bits(model)
        assert versions.full_bytes == sum(map(len, bits(model).values()))
        assert 0 < versions.delta_bytes < 3 * versions.full_bytes
        assert versions.delta_bytes + versions.saved_bytes == 2 * versions.full_bytes


def published(job: Job, model: nn.Module, name: str = "policy", versions: int = 1, **options: Any) -> Any:
    """A worker that has published; its cluster and optimizer."""
    cluster = job.cluster()
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
    for number in range(1, versions + 1):
        cluster.publish(name, optimizer, step=number, wait=True, **options)
    return cluster, optimizer


@pytest.mark.parametrize("before", [True, False], ids=["before its connections", "with connections"])
def test_a_subscription_that_another_thread_closes_ends_while_it_receives(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    with running_job() as job:
        published(job, net())
        with reader(job) as versions:
            at = "_source" if before else "_received"
            original = getattr(VersionReader, at)

            def closed(reading: VersionReader, *arguments: Any) -> Any:
                # As another thread does, at this moment.
                found = original(reading, *arguments) if before else None
                versions.close()
                return found if before else original(reading, *arguments)

            monkeypatch.setattr(VersionReader, at, closed)
            assert list(versions) == []


def test_tied_empty_scalar_and_turned_tensors_and_payloads_of_nan_are_exact() -> None:
    model, mine = Odd(), Odd()
    with torch.no_grad():
        model.first.weight.view(torch.int32)[0, 0] = 0x7FC01234
        model.turned.view(torch.int32)[1, 1] = -1 - 0x12345
        model.bfloat.view(torch.int16)[0, 0] = 0x7FA5
    with running_job(shards=2) as job:
        cluster, optimizer = published(job, model)
        with reader(job) as versions:
            for number in (1, 2):
                version = next(versions)
                version.apply_(mine)
                assert version.number == number
                assert bits(mine) == bits(model)
                assert set(version.tensors()) == set(bits(model)) - {"second.weight"}
                with torch.no_grad():
                    model.scale.fill_(3.0)
                    model.count.fill_(number)
                optimizer.zero_grad()
                (model() * 0).backward()
                optimizer.step()
                cluster.publish("policy", optimizer, step=2, wait=True)


def test_a_reader_that_asks_for_bfloat16_gets_converted_values_and_small_deltas() -> None:
    with running_job(shards=2) as job, reader(job, dtype=torch.bfloat16) as versions:
        model, mine = net(), net(2).to(torch.bfloat16)
        cluster, optimizer = published(job, model)
        for number in range(1, 4):
            next(versions).apply_(mine)
            assert bits(mine) == bits(net_like(model))
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=number, wait=True)


def net_like(model: nn.Module) -> nn.Module:
    made = net()
    made.load_state_dict(state(model))
    return made.to(torch.bfloat16)


def test_values_in_files_are_converted_whatever_stands_before_them(tmp_path: Path) -> None:
    with running_job(start_shards=0) as job, reader(job, dtype=torch.float64) as versions:
        job.start_shard(0, storage=durable(tmp_path))
        model = Odd()
        published(job, model)
        own = state(model)
        for name, value in next(versions).tensors().items():
            assert torch.equal(value, own[name].double() if own[name].is_floating_point() else own[name])


def test_a_reader_skips_versions_between_and_goes_through_their_deltas() -> None:
    with running_job() as job, reader(job) as versions:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        next(versions)
        full = versions.full_bytes
        for number in range(2, 5):
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=number, wait=True)
        version = next(versions)
        version.apply_(mine)
        assert version.number == 4
        assert bits(mine) == bits(model)
        assert versions.full_bytes in (full, 2 * full)


def test_have_names_the_version_after_which_a_reader_goes_on() -> None:
    with running_job() as job:
        published(job, net(), versions=3)
        with reader(job, have=2) as versions:
            assert next(versions).number == 3
            assert versions.fetch(np.int64(2)).number == 2
        with reader(job, have=np.int64(3), follow=False) as versions:
            assert list(versions) == []
        with reader(job, have=4) as versions, pytest.raises(UnknownVersion, match="no version 4"):
            next(versions)


def test_who_does_not_follow_ends_after_one_version_although_newer_ones_come() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net())
        with reader(job, follow=False) as versions:
            for version in versions:
                assert version.number == 1
                cluster.publish("policy", optimizer, step=2, wait=True)


@pytest.mark.parametrize("name", ["", "a/b", "../policy", 3, None])
def test_what_is_no_name_is_refused_before_anything_is_read(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="no name for what is published"):
        ps_worker.subscribe(name, coordinator="127.0.0.1:1")


def test_one_version_is_fetched_by_its_number_unless_it_was_removed() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net(), versions=3, keep=2)
        with reader(job) as versions:
            assert versions.fetch(2).number == 2
            assert next(versions).number == 3
            with pytest.raises(VersionGone, match="version 1 of 'policy' was removed"):
                versions.fetch(1)
            with pytest.raises(UnknownVersion, match="no version 9"):
                versions.fetch(9)
            cluster.publish("policy", optimizer, step=4, wait=True)
            assert next(versions).number == 4


def test_a_pinned_version_is_there_when_newer_ones_have_come() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net(), keep=1)
        job.client.pin_weights("policy", 1, "me", 60.0)
        for number in range(2, 5):
            cluster.publish("policy", optimizer, step=number, keep=1, wait=True)
        with reader(job) as versions:
            assert versions.fetch(1).number == 1
            with pytest.raises(VersionGone):
                versions.fetch(3)
        assert [version.number for version in job.client.get_weights()[0].versions] == [1, 4]


def test_what_changed_is_sent_also_where_versions_between_are_not_there_any_more() -> None:
    with running_job() as job:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model, keep=1)
        job.client.pin_weights("policy", 1, "me", 60.0)
        with reader(job, dtype=torch.float64) as converted, reader(job) as versions:
            assert (next(versions).number, next(converted).number) == (1, 1)
            whole, whole_converted = versions.full_bytes, converted.full_bytes
            for number in range(2, 5):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                        parameter.grad.view(-1)[number % parameter.numel()] = 1.0
                optimizer.step()
                cluster.publish("policy", optimizer, step=number, keep=1, wait=True)
            version = next(versions)
            version.apply_(mine)
            assert (version.number, versions.full_bytes) == (4, whole)
            assert 0 < versions.delta_bytes < whole
            assert bits(mine) == bits(model)
            assert (next(converted).number, converted.full_bytes) == (4, whole_converted)


def test_another_model_is_refused_with_every_difference_and_stays_as_it_is() -> None:
    with running_job() as job:
        published(job, net())
        with reader(job) as versions:
            version = next(versions)
            other = nn.Sequential(nn.Linear(40, 31), nn.Tanh(), nn.Linear(30, 3).double())
            before = bits(other)
            with pytest.raises(
                ModelMismatch, match=r"'0.weight' has shape .*'2.weight' has dtype .*'3.weight' is missing"
            ):
                version.apply_(other)
            assert bits(other) == before
            with pytest.raises(ModelMismatch, match="'more' is not in the version"):
                version.apply_([*net().named_parameters(), ("more", torch.nn.Parameter(torch.zeros(2)))])


def test_a_reader_that_begins_before_the_first_version_waits_and_ends_with_the_job() -> None:
    with running_job() as job:
        seen: list[int] = []

        def follow() -> None:
            with reader(job) as versions:
                seen.extend(version.number for version in versions)

        thread = threading.Thread(target=follow)
        thread.start()
        cluster, _ = published(job, net())
        wait_until(lambda: seen == [1])
        cluster.close()
        thread.join(60)
        assert not thread.is_alive()


def test_without_wait_the_version_comes_while_training_goes_on() -> None:
    with running_job(shards=2) as job, reader(job) as versions:
        model = net()
        cluster = job.cluster()
        optimizer = cluster.optimizer(torch.optim.Adam, model, lr=1e-2)
        step(model, optimizer)
        then = bits(model)
        assert cluster.publish("policy", optimizer, step=1) == 1
        for _ in range(3):
            step(model, optimizer)
        version, mine = next(versions), net(2)
        version.apply_(mine)
        assert bits(mine) == then != bits(model)


def test_two_models_of_a_job_have_names_of_their_own() -> None:
    with running_job() as job:
        cluster = job.cluster()
        one, two = net(1), net(2)
        first = cluster.optimizer(torch.optim.SGD, one, lr=0.1, name="one")
        cluster.optimizer(torch.optim.SGD, two, lr=0.1, name="two")
        cluster.publish("a", first, step=1, wait=True)
        cluster.publish("b", two, step=1, wait=True)
        with pytest.raises(InvalidRequest, match="another model"):
            cluster.publish("a", two, step=2)
        with pytest.raises(InvalidRequest, match="not clear which"):
            cluster.publish("c", step=2)
        for name, model in (("a", one), ("b", two)):
            mine = net(3)
            with reader(job, name) as versions:
                next(versions).apply_(mine)
            assert bits(mine) == bits(model)


@pytest.mark.parametrize(
    "options",
    [
        {"step": -1},
        {"step": 1.0},
        {"step": True},
        {"step": 1, "keep": 0},
        {"step": 1, "keep": "8"},
        {"step": 1, "keep": 1.5},
        {"step": 1, "keep": True},
        {"step": 1, "metadata": {"a": float("nan")}},
        {"step": 1, "metadata": {"a": object()}},
        {"step": 1, "metadata": {"a": "b" * 5_000_000}},
        {"step": 1, "metadata": {"a": reduce(lambda inner, _: [inner], range(64), 0)}},
        {"step": 1, "metadata": {"a": reduce(lambda inner, _: [inner], range(5000), [])}},
    ],
)
def test_what_cannot_be_published_is_refused(options: dict[str, Any]) -> None:
    with running_job() as job:
        cluster, model = job.cluster(), net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        with pytest.raises(InvalidRequest):
            cluster.publish("policy", optimizer, **options)
        for name in ("a/b", 3, None):
            with pytest.raises(InvalidRequest, match="no name"):
                cluster.publish(name, optimizer, step=1)
        with pytest.raises(InvalidRequest, match="a part of model 'model' cannot be published"):
            cluster.publish("policy", model[0], step=1)
        outer = nn.ModuleDict({"body": nn.ModuleList([net(2)])})
        cluster.optimizer(torch.optim.SGD, outer, lr=0.1, name="outer")
        for inner in (outer["body"], outer["body"][0]):
            with pytest.raises(
                InvalidRequest, match=r"a part of model 'outer'.*is inside it, where they are named 'body"
            ):
                cluster.publish("other", inner, step=1)
        assert cluster.publish("other", outer, step=1, wait=True) == 1
        assert cluster.publish("policy", optimizer, step=1, wait=True) == 1


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_cache_of_another_job_is_dropped_with_a_word_whatever_its_number(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with running_job(job_id="first") as job:
        published(job, net(), versions=2)
        with reader(job, cache=tmp_path) as versions:
            assert next(versions).number == 2
    with running_job(job_id="second") as job:
        model = net(3)
        published(job, model, versions=number)
        with reader(job, cache=tmp_path) as versions:
            version, mine = next(versions), net(2)
            version.apply_(mine)
            assert (version.number, bits(mine)) == (number, bits(model))
            assert (versions.delta_bytes, versions.full_bytes > 0) == (0, True)
        assert "the cache is of another job, and is not used any more" in caplog.text
        with reader(job, cache=tmp_path) as versions:
            assert next(versions).number == number
            assert versions.full_bytes == 0


def test_a_cached_version_serves_while_the_coordinator_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_job() as job:
        published(job, net())
        with reader(job, cache=tmp_path) as versions:
            assert next(versions).number == 1
    monkeypatch.setattr("ps_protocol.times.BRIEF_CALL_SECONDS", 0.2)
    # The port of the job may be that of another one by now.
    absent = f"127.0.0.1:{free_port()}"
    with reader(job, cache=tmp_path, coordinator=absent, reconnect_timeout_seconds=0.2) as versions:
        assert next(versions).number == 1
        assert "version 1 is that of the cache" in caplog.text
        with pytest.raises(Unavailable):
            next(versions)


def test_a_reader_with_a_cache_goes_on_from_it(tmp_path: Path) -> None:
    with running_job() as job:
        model = net()
        cluster, optimizer = published(job, model)
        with reader(job, cache=tmp_path) as versions:
            assert next(versions).number == 1
        with reader(job, cache=tmp_path) as versions:
            mine = net(2)
            version = next(versions)
            version.apply_(mine)
            assert (version.number, versions.full_bytes) == (1, 0)
            assert bits(mine) == bits(model)
            cluster.publish("policy", optimizer, step=2, wait=True)
            assert next(versions).number == 2
            assert versions.full_bytes == 0
        (file,) = tmp_path.iterdir()
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with reader(job, cache=tmp_path) as versions:
            assert next(versions).number == 2
            assert versions.full_bytes > 0


def test_a_cache_that_is_no_folder_is_refused_and_a_version_of_another_name_in_it_is_not_taken(tmp_path: Path) -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net(), versions=3)
        cluster.publish("other", optimizer, step=9, wait=True)
        with reader(job, cache=tmp_path / "cache") as versions:
            next(versions)
        (tmp_path / "cache" / "policy.version").rename(tmp_path / "cache" / "other.version")
        with reader(job, "other", cache=tmp_path / "cache") as versions:
            assert next(versions).step == 9
        with pytest.raises(ConfigError, match="is no folder, and cannot be made"):
            ps_worker.subscribe("policy", coordinator=job.address, cache=tmp_path / "cache" / "other.version")


@pytest.mark.parametrize("number", [True, 1.5, "1", -1, 1 << 63])
def test_what_is_no_number_of_a_version_is_refused(number: Any) -> None:
    with pytest.raises(InvalidRequest, match="versions have numbers from 1"):
        ps_worker.subscribe("policy", number, coordinator="127.0.0.1:1")
    with (
        ps_worker.subscribe("policy", coordinator="127.0.0.1:1") as versions,
        pytest.raises(InvalidRequest, match="versions have numbers from 1"),
    ):
        versions.fetch(number)


def test_there_is_no_version_0_and_a_dtype_is_one_of_torch() -> None:
    with (
        ps_worker.subscribe("policy", coordinator="127.0.0.1:1") as versions,
        pytest.raises(InvalidRequest, match="versions have numbers from 1"),
    ):
        versions.fetch(0)
    dtype: Any = "bfloat16"
    with pytest.raises(ConfigError, match="not converted to this dtype"):
        ps_worker.subscribe("policy", coordinator="127.0.0.1:1", dtype=dtype)


def test_another_thread_may_close_a_subscription_which_ends_it() -> None:
    with running_job() as job, ThreadPoolExecutor(1) as pool:
        published(job, net())
        versions = ps_worker.subscribe("policy", coordinator=job.address)
        assert next(versions).number == 1
        waiting = pool.submit(list, versions)
        wait_until(lambda: [each.have for each in job.client.get_weights()[0].readers] == [1])
        versions.close()
        assert waiting.result(60) == []


def test_a_forked_child_cannot_use_the_subscription_of_its_parent_nor_make_one() -> None:
    with running_job() as job:
        published(job, net())
        with reader(job) as versions:
            ours, theirs = multiprocessing.Pipe(duplex=False)

            def child() -> None:
                own = partial(ps_worker.subscribe, "policy", coordinator=job.address)
                others = partial(admin.connect, job.address), partial(ps_worker.connect, job.address)
                for use in (versions.__next__, partial(versions.fetch, 1), own, *others):
                    try:
                        use()
                    except InvalidRequest as error:
                        theirs.send(str(error))
                versions.close()
                theirs.send("closed")

            process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
            process.start()
            told = [ours.recv() if ours.poll(60) else "nothing" for _ in range(6)]
            process.kill()
            process.join()
            assert all("cannot use the subscription of its parent" in text for text in told[:2])
            assert all("was forked while its parent was connected" in text for text in told[2:5])
            assert all("method spawn" in text for text in told[:5])
            assert told[5] == "closed"
            assert next(versions).number == 1


def test_a_cache_without_room_costs_a_reader_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with running_job() as job, reader(job, cache=tmp_path) as versions:
        cluster, optimizer = published(job, net())
        assert next(versions).number == 1
        monkeypatch.setattr(WholeVersion, "save", full)
        cluster.publish("policy", optimizer, step=2, wait=True)
        assert next(versions).number == 2
    with reader(job, cache=tmp_path) as versions:
        assert next(versions).number == 1


def durable(folder: Path, durability: Durability = Durability.DURABLE) -> StorageConfig:
    return StorageConfig(durability=durability, data_dir=folder)


@pytest.mark.usefixtures("_patient")
def test_versions_on_disk_are_there_again_after_their_shard_was_started_again(tmp_path: Path) -> None:
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        model = net()
        cluster, optimizer = published(job, model, versions=2)
        weights = tmp_path / "shard-0" / "weights" / "policy"
        assert sorted(path.name for path in weights.iterdir()) == ["000001.piece", "000002.piece"]
        job.stop_shard(0)
        (weights / "000003.piece.7.part").write_bytes(b"half")
        job.start_shard(0, storage=durable(tmp_path))
        with reader(job) as versions:
            mine = net(2)
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)
            step(model, optimizer)
            assert cluster.publish("policy", optimizer, step=3, keep=1, wait=True) == 3
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)
            assert versions.delta_bytes > 0
        for number in (4, 5):
            cluster.publish("policy", optimizer, step=number, keep=1, wait=True)
        assert sorted(path.name for path in weights.iterdir()) == ["000004.piece", "000005.piece"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as-is", "bf16"])
def test_the_first_version_after_a_start_of_the_shard_comes_as_what_changed(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        model, mine = net(), net(2).to(dtype)
        cluster, optimizer = published(job, model)
        with reader(job, dtype=dtype) as versions:
            next(versions)
            full = versions.full_bytes
            job.stop_shard(0)
            job.start_shard(0, storage=durable(tmp_path))
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=2, wait=True)
            next(versions).apply_(mine)
            assert bits(mine) == bits(net_like(model) if dtype else model)
            assert versions.delta_bytes > 0
            assert versions.full_bytes == full


def test_a_version_is_published_while_a_checkpoint_is_being_written_and_slices_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        written = write_part(*arguments, **options)
        ended.append("part")  # before the coordinator hears of it
        return written

    write_part = quiesce.write_part
    monkeypatch.setattr(quiesce, "write_part", slow)
    ended: list[str] = []
    made: list[Any] = []
    with running_job(shards=2, checkpoints=CheckpointConfig(tmp_path)) as job:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)

        def checkpoint() -> None:
            with admin.connect(job.address) as operator:
                made.append(operator.checkpoint())

        def drain() -> None:
            with admin.connect(job.address) as operator:
                operator.drain([1])
            ended.append("move")

        threads = [threading.Thread(target=checkpoint), threading.Thread(target=drain)]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        try:
            for number in (2, 3):
                step(model, optimizer)
                assert cluster.publish("policy", optimizer, step=number, wait=True) == number
            with reader(job) as versions:
                next(versions).apply_(mine)
            assert bits(mine) == bits(model)
            assert ended == []
        finally:
            go_on.set()
            for thread in threads:
                thread.join(60)
        assert ended == ["part", "part", "move"]
        assert len(made) == 1
        assert cluster.publish("policy", optimizer, step=4, wait=True) == 4


def test_what_was_taken_and_not_committed_makes_way_for_the_next_version(tmp_path: Path) -> None:
    with running_job(shards=2, start_shards=0) as job:
        for shard in range(2):
            job.start_shard(shard, storage=durable(tmp_path))
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        failing = pytest.MonkeyPatch()
        finish = HeldWeights.finish

        async def failed(held: HeldWeights, name: str, number: int) -> Any:
            piece = await finish(held, name, number)
            if held._shard == 1:
                raise Unavailable("injected")
            return piece

        with failing.context() as patch:
            patch.setattr(HeldWeights, "finish", failed)
            assert cluster.publish("policy", optimizer, step=2) == 2
            cluster._publishing._finish()
        assert [version.number for version in job.client.get_weights()[0].versions] == [1]
        step(model, optimizer)
        assert cluster.publish("policy", optimizer, step=3, wait=True) == 2
        with reader(job) as versions:
            version = next(versions)
            version.apply_(mine)
            assert (version.number, version.step) == (2, 3)
            assert bits(mine) == bits(model)
        files = [sorted(p.name for p in (tmp_path / f"shard-{n}" / "weights" / "policy").iterdir()) for n in range(2)]
        assert files == [["000001.piece", "000002.piece"]] * 2


@contextmanager
def failing_shard(error: Exception) -> Iterator[None]:
    """Shards take pieces, and cannot write them."""

    async def failed(*_: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldWeights, "finish", failed)
        yield


def test_a_publisher_that_did_not_wait_is_told_by_its_next_version_that_one_could_not_be_written() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net())
        with failing_shard(StorageFull("no room", shard="0")):
            assert cluster.publish("policy", optimizer, step=2) == 2
            with pytest.raises(
                StorageFull, match=r"version 2 of 'policy' \(step 2\) is not published: .*no room"
            ) as told:
                cluster.publish("policy", optimizer, step=3)
            assert told.value.shard == "0"
        assert cluster.publish("policy", optimizer, step=3, wait=True) == 2


def test_a_publisher_goes_on_where_a_server_was_lost_and_its_next_version_has_the_number() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net())
        with failing_shard(Unavailable("lost")):
            assert cluster.publish("policy", optimizer, step=2) == 2
            cluster._publishing._finish()
        assert cluster.publish("policy", optimizer, step=3, wait=True) == 2
        assert [each.step for each in job.client.get_weights()[0].versions] == [1, 3]


@pytest.mark.parametrize("error", [StorageFull("no room"), Unavailable("lost")])
def test_a_clean_end_tells_a_publisher_that_its_last_version_could_not_be_written(error: Exception) -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net())
        with failing_shard(error):
            assert cluster.publish("policy", optimizer, step=2) == 2
            with pytest.raises(type(error), match=r"version 2 of 'policy' \(step 2\) is not published"):
                cluster.close()
        cluster.close()


def test_a_version_that_was_given_up_is_not_written_beside_the_next_one(tmp_path: Path) -> None:
    with running_job(shards=2, start_shards=0) as job:
        for shard in range(2):
            job.start_shard(shard, storage=durable(tmp_path))
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        release, writing, most = threading.Event(), [0], [0]
        write, finish = HeldWeights._write, HeldWeights.finish

        def slow(held: HeldWeights, *arguments: Any) -> Any:
            if held._shard != 1:
                return write(held, *arguments)
            writing[0] += 1
            most[0] = max(most[0], writing[0])
            try:
                release.wait(30)
                return write(held, *arguments)
            finally:
                writing[0] -= 1

        async def failed(held: HeldWeights, name: str, number: int) -> Any:
            if held._shard == 1:
                raise Unavailable("injected: while it is still being written")
            return await finish(held, name, number)

        failing = pytest.MonkeyPatch()
        with failing.context() as patch:
            patch.setattr(HeldWeights, "_write", slow)
            with failing.context() as first:
                first.setattr(HeldWeights, "finish", failed)
                assert cluster.publish("policy", optimizer, step=2) == 2
                cluster._publishing._finish()
            step(model, optimizer)
            assert cluster.publish("policy", optimizer, step=3) == 2
            release.set()
            cluster._publishing._finish()
        assert most == [1]
        with reader(job) as versions:
            version = next(versions)
            version.apply_(mine)
            assert (version.number, version.step) == (2, 3)
            assert bits(mine) == bits(model)


def test_a_version_whose_file_is_damaged_is_gone_and_the_next_comes_whole(tmp_path: Path) -> None:
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        model = net()
        cluster, optimizer = published(job, model)
        job.stop_shard(0)
        (file,) = (tmp_path / "shard-0" / "weights" / "policy").iterdir()
        data = bytearray(file.read_bytes())
        data[10] ^= 1
        file.write_bytes(data)
        job.start_shard(0, storage=durable(tmp_path))
        with reader(job, follow=False) as versions, pytest.raises(VersionGone, match="its file is damaged"):
            next(versions)
        with reader(job) as versions:
            thread = threading.Thread(target=cluster.publish, args=("policy", optimizer), kwargs={"step": 2})
            thread.start()
            assert next(versions).number == 2
            thread.join()


def test_a_version_in_the_memory_of_a_shard_that_ended_is_gone_and_the_next_one_is_whole() -> None:
    with running_job(shards=2) as job:
        published(job, net())
        with reader(job) as versions:
            assert next(versions).number == 1
            job.stop_shard(0)
            job.start_shard(0)
            with pytest.raises(VersionGone, match="in memory"):
                versions.fetch(1)


def test_a_version_of_which_a_shard_that_was_drained_and_has_ended_held_a_part_is_gone(tmp_path: Path) -> None:
    with running_job(shards=2, start_shards=0) as job:
        for index in range(2):
            job.start_shard(index, storage=durable(tmp_path))
        model = net()
        cluster, optimizer = published(job, model)
        with admin.connect(job.address) as operator:
            operator.drain([1])
        with reader(job) as versions:
            assert next(versions).number == 1
            job.stop_shard(1)
            with pytest.raises(VersionGone, match="shard 1, which held a part of it, has left the job"):
                versions.fetch(1)
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=2, wait=True)
            mine = net(2)
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)


def test_a_shard_that_holds_nothing_of_the_model_any_more_removes_what_is_not_kept(tmp_path: Path) -> None:
    def files(shard: int) -> list[str]:
        return sorted(path.name for path in (tmp_path / f"shard-{shard}" / "weights" / "policy").iterdir())

    with running_job(shards=2, start_shards=0) as job:
        for index in range(2):
            job.start_shard(index, storage=durable(tmp_path))
        model = net()
        cluster, optimizer = published(job, model, versions=2, keep=2)
        with admin.connect(job.address) as operator:
            operator.drain([1])
        assert files(1) == ["000001.piece", "000002.piece"]
        for number in (3, 4):
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=number, keep=2, wait=True)
        wait_until(lambda: files(1) == ["000002.piece"])
        cluster.publish("policy", optimizer, step=5, keep=2, wait=True)
        wait_until(lambda: files(1) == [])


def test_a_late_word_of_what_is_kept_removes_no_newer_version() -> None:
    held = weights.HeldPieces(0, "shard 0")
    for number in (1, 2, 3):
        manifest = pb.PieceManifest(name="policy", number=number)
        held.put(weights.HeldPiece(weights.PieceForm.of(manifest, memoryview(b"")), None, checked=True))
    held.keep("policy", [1], 2)
    assert [number for _, number, _ in held.held] == [1, 3]


def test_a_start_removes_what_is_damaged_or_elsewhere_and_leaves_what_a_shard_did_not_write(tmp_path: Path) -> None:
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        model, mine = net(), net(2)
        published(job, model, versions=3)
        job.stop_shard(0)
        folder = tmp_path / "shard-0" / "weights"
        first, second = piece_file(tmp_path, 1), piece_file(tmp_path, 2)
        first.write_bytes(first.read_bytes()[:-1])
        moved = folder / "other" / "000009.piece"
        moved.parent.mkdir()
        second.rename(moved)
        (folder / "policy" / "folder").mkdir()
        (folder / "policy" / "folder.piece").mkdir()
        (folder / "policy" / "notes.txt").write_text("of the operator")
        (folder / "policy" / "000004.piece.7.part").write_bytes(b"half")
        job.start_shard(0, storage=durable(tmp_path))
        with reader(job) as versions:
            version = next(versions)
            version.apply_(mine)
            assert version.number == 3
            assert bits(mine) == bits(model)
            for number in (1, 2):
                with pytest.raises(VersionGone, match="it does not hold it"):
                    versions.fetch(number)
        assert sorted(path.name for path in (folder / "policy").iterdir()) == [
            "000003.piece",
            "folder",
            "folder.piece",
            "notes.txt",
        ]
        assert not moved.exists()


def test_versions_of_a_released_model_are_gone() -> None:
    with running_job() as job:
        _, optimizer = published(job, net())
        optimizer.close(release=True)
        with reader(job) as versions, pytest.raises(VersionGone):
            versions.fetch(1)


@pytest.mark.usefixtures("_patient")
def test_the_readers_of_a_name_are_shown_with_what_they_have() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net())
        with reader(job) as versions:
            next(versions)
            cluster.publish("policy", optimizer, step=2, wait=True)
            (state,) = job.client.get_weights()
            assert [each.have for each in state.readers] == [0]
            next(versions)
            wait_until(lambda: [each.have for each in job.client.get_weights()[0].readers] == [1])
        assert job.client.get_weights()[0].readers == ()


def test_a_damaged_delta_is_noticed_and_the_version_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = weights.encode

    def damaged(*arguments: Any) -> Any:
        link = encode(*arguments)
        assert link is not None
        first = bytearray(link.parts[0])
        first[len(first) // 2] ^= 1
        return weights.VersionLink(link.message, (memoryview(first), *link.parts[1:]))

    monkeypatch.setattr(weights, "encode", damaged)
    with running_job() as job, reader(job) as versions:
        model, mine = nn.Linear(400, 40), nn.Linear(400, 40)
        cluster, optimizer = published(job, model)
        next(versions)
        with torch.no_grad():
            model.weight[0, 0] += 1.0
        optimizer.zero_grad()
        (model.weight.sum() * 0 + model.bias.sum() * 0).backward()
        optimizer.step()
        cluster.publish("policy", optimizer, step=2, wait=True)
        next(versions).apply_(mine)
        assert bits(mine) == bits(model)
        assert (versions.delta_bytes, versions.full_bytes) == (0, 2 * 4 * (400 * 40 + 40))


def test_a_version_that_comes_damaged_and_whole_is_an_error_and_the_reader_goes_on_from_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = weights._whole
    with running_job() as job, reader(job) as versions:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        next(versions).apply_(mine)
        before = bits(mine)
        step(model, optimizer)
        cluster.publish("policy", optimizer, step=2, wait=True)
        versions.restart()

        def damaged(form: Any, number: int) -> Any:
            link = whole(form, number)
            return weights.VersionLink(link.message, (memoryview(bytes(len(link.parts[0]))),))

        monkeypatch.setattr(weights, "_whole", damaged)
        with pytest.raises(DamagedData, match="do not have the checksum"):
            next(versions)
        assert bits(mine) == before
        monkeypatch.setattr(weights, "_whole", whole)
        version = next(versions)
        version.apply_(mine)
        assert version.number == 2
        assert bits(mine) == bits(model)


def test_an_operator_sees_what_is_published_and_keeps_a_version() -> None:
    with running_job() as job, ps_worker.admin.connect(job.address) as operator:
        assert operator.weights() == ()
        cluster, optimizer = published(job, net(), keep=1)
        operator.pin_weights("policy", 1, seconds=60.0)
        for number in (2, 3):
            cluster.publish("policy", optimizer, step=number, keep=1, wait=True)
        (state,) = operator.weights()
        assert (state.newest, state.keep, state.gone) == (3, 1, ())
        assert [(pin.number, pin.holder) for pin in state.pins] == [(1, "operator")]
        assert [version.number for version in state.versions] == [1, 3]
        operator.pin_weights("policy", 1, seconds=0.0)
        assert operator.weights()[0].pins == ()


def test_psctl_lists_what_is_published_and_pins_a_version() -> None:
    def psctl(*arguments: str) -> str:
        done = CliRunner().invoke(main.main, ["weights", *arguments, "--coordinator", address])
        assert done.exit_code == 0, done.output
        return done.output

    with running_job() as job:
        address = job.address
        assert psctl("list") == "nothing is published\n"
        cluster, optimizer = published(job, net(), keep=1, metadata={"loss": 0.5})
        with reader(job) as versions:
            next(versions)
            assert "version 1 of 'policy' is kept for 60 s" in psctl("pin", "policy", "1", "--seconds", "60")
            cluster.publish("policy", optimizer, step=2, keep=1, wait=True)
            thread = threading.Thread(target=lambda: list(versions), daemon=True)
            thread.start()
            wait_until(lambda: "version 2, 0 behind" in psctl("list"))
            text = psctl("list")
            assert "policy: version 2 of model 'model', 1 reader, up to 0 behind, " in text
            assert "pinned by operator" in text
            (name,) = json.loads(psctl("list", "--json"))["names"]
            assert [version["number"] for version in name["versions"]] == [1, 2]
            assert name["versions"][0]["metadata"] == {"loss": 0.5}
            assert [each["behind"] for each in name["readers"]] == [0]
            cluster.close()
            thread.join(60)


def test_tables_of_a_published_model_say_where_their_feeds_stood() -> None:
    with running_job(shards=2) as job:
        cluster = job.cluster()
        model = nn.ModuleList([cluster.embedding(4, name="words"), nn.Linear(4, 1)])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        model[1](model[0](torch.arange(20))).sum().backward()
        optimizer.step()
        cluster.publish("policy", optimizer, step=1, wait=True)
        with reader(job) as versions:
            version, mine = next(versions), nn.ModuleDict({"1": nn.Linear(4, 1)})
        version.apply_(mine)
        assert torch.equal(mine["1"].weight, model[1].weight)
        (change,) = [c for c in ps_worker.feed.follow_table(job.address, "words", follow=False) if c.whole]
        assert version.tables == {"words": change.cursor}


def large() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(600, 1000)


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The peers to which a side channel was opened."""
    peers: list[str] = []
    attach = pieces.attached_bulk

    def opened(offered: SideChannel, address: str, peer: str, *rest: Any) -> Any:
        carrier = attach(offered, address, peer, *rest)
        peers.append(type(carrier).__name__)
        return carrier

    monkeypatch.setattr(pieces, "attached_bulk", opened)
    return peers


def test_a_large_piece_comes_over_a_side_channel(attached: list[str]) -> None:
    with running_job(shards=2) as job, reader(job) as versions:
        model, mine = large(), nn.Linear(600, 1000)
        published(job, model)
        next(versions).apply_(mine)
        assert bits(mine) == bits(model)
        assert attached == ["PlainCarrier"] * 2


def test_a_side_channel_has_the_security_of_the_job(attached: list[str], tmp_path: Path) -> None:
    lab = made_folder(tmp_path / "lab")
    with running_job(lab=lab) as job:
        model, mine = large(), nn.Linear(600, 1000)
        published(job, model)
        with reader(job, security=lab.settings("reader", role=AccessRole.READER)) as versions:
            next(versions).apply_(mine)
        assert bits(mine) == bits(model)
        assert attached == ["TlsCarrier"]


def test_where_a_side_channel_does_not_work_the_piece_comes_as_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(pieces, "attached_bulk", refused)
    with running_job(start_shards=0) as job:
        job.start_shard(0, side_channels=SideChannelConfig(token_seconds=0.2))
        model, mine = large(), nn.Linear(600, 1000)
        cluster, optimizer = published(job, model)
        with reader(job) as versions:
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)
            cluster.publish("policy", optimizer, step=2, wait=True)
            assert next(versions).number == 2


def test_a_side_channel_that_breaks_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attach, broken = pieces.attached_bulk, []

    def breaking(*arguments: Any) -> Any:
        carrier = attach(*arguments)
        if not broken:
            broken.append(carrier)
            carrier.shut_down()
        return carrier

    monkeypatch.setattr(pieces, "attached_bulk", breaking)
    with running_job() as job, reader(job) as versions:
        model, mine = large(), nn.Linear(600, 1000)
        published(job, model)
        next(versions).apply_(mine)
        assert broken
        assert bits(mine) == bits(model)


def test_a_reader_of_a_piece_that_is_removed_is_told_so_and_not_left_without_an_answer() -> None:
    async def read() -> None:
        piece = weights.HeldPiece(weights.PieceForm.of(pb.PieceManifest(), memoryview(b"")), None, checked=True)

        async def send() -> None:
            with piece.reading():
                await asyncio.Event().wait()

        sending = asyncio.create_task(send())
        await asyncio.sleep(0)
        piece.end_readers()
        with pytest.raises(Unavailable, match="removed while it was sent"):
            await sending
        assert not piece.is_read

    asyncio.run(read())


def test_converted_values_are_kept_of_two_neighbouring_versions_only_and_deltas_between_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces: list[weights.HeldPiece] = []
    finish = weights.HeldWeights.finish

    async def finished(held: weights.HeldWeights, name: str, number: int) -> weights.HeldPiece:
        pieces.append(await finish(held, name, number))
        return pieces[-1]

    monkeypatch.setattr(weights.HeldWeights, "finish", finished)
    with running_job() as job, reader(job, dtype=torch.bfloat16) as versions:
        model, mine = net(), net(2).to(torch.bfloat16)
        cluster, optimizer = published(job, model)
        next(versions)
        full = versions.full_bytes
        for number in range(2, 7):
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=number, wait=True)
            next(versions).apply_(mine)
            assert bits(mine) == bits(net_like(model))
        assert versions.full_bytes == full
        assert [len(piece.forms) for piece in pieces] == [0, 0, 0, 0, 1, 1]


def test_a_publisher_is_told_at_once_that_the_coordinator_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.times.CHECKPOINT_SECONDS", 60.0)
    address = f"127.0.0.1:{free_port()}"
    ask = PublishAsk("policy", "model", 1, "{}", 8, "token")
    with CoordinatorClient(address) as client, pytest.raises(Unavailable, match="UNAVAILABLE"):
        list(client.publish(Member(Role.WORKER, 0, 1, ""), ask))


def test_a_publisher_hears_of_an_error_that_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("nobody expected this")

    with running_job() as job:
        cluster, optimizer = published(job, net())
        monkeypatch.setattr(CoordinatorClient, "publish", broken)
        with pytest.raises(RuntimeError, match="nobody expected"):
            cluster.publish("policy", optimizer, step=2)


def test_a_job_without_a_coordinator_is_given_up_after_the_readers_time() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        ps_worker.subscribe("policy", coordinator=address, reconnect_timeout_seconds=0.5) as versions,
        pytest.raises(Unavailable),
    ):
        next(versions)


def piece_file(folder: Path, number: int = 1, shard: int = 0) -> Path:
    return folder / f"shard-{shard}" / "weights" / "policy" / f"{number:06d}.piece"


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"bulk": False}], ids=["as-is", "bf16", "chunks"])
def test_a_file_that_was_cut_costs_its_version_and_not_the_shard(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options.pop("bulk", True):
        monkeypatch.setenv("PS_TRANSPORT", "grpc")
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        model, mine = large(), nn.Linear(600, 1000, dtype=options.get("dtype"))
        cluster, optimizer = published(job, model, versions=2)
        with reader(job, follow=False, **options) as versions:
            versions.fetch(1)
            versions.restart()
            os.truncate(piece_file(tmp_path, 2), 1 << 20)
            with pytest.raises(VersionGone, match="version 2 of 'policy' is gone from shard 0"):
                versions.fetch(2)
            optimizer.step()
            cluster.publish("policy", optimizer, step=3, wait=True)
            version = next(versions)
            version.apply_(mine)
            assert version.number == 3


def test_a_sector_that_cannot_be_read_costs_its_version_and_not_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "input/output error")

    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        cluster, optimizer = published(job, net())
        with reader(job, follow=False) as versions:
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", failing)
                with pytest.raises(VersionGone, match="its file is damaged"):
                    versions.fetch(1)
            cluster.publish("policy", optimizer, step=2, wait=True)
            assert next(versions).number == 2


def test_where_the_file_that_a_delta_builds_on_was_cut_the_next_version_comes_whole(tmp_path: Path) -> None:
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        with reader(job) as versions:
            next(versions)
            os.truncate(piece_file(tmp_path), 10)
            step(model, optimizer)
            cluster.publish("policy", optimizer, step=2, wait=True)
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)
            assert versions.delta_bytes == 0


def test_a_file_that_cannot_be_opened_now_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, failed = os.open, []

    def failing(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".piece") and not failed:
            failed.append(path)
            raise OSError(errno.EMFILE, "too many open files")
        return opening(path, *arguments, **options)

    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path))
        published(job, net())
        with reader(job) as versions:
            monkeypatch.setattr(os, "open", failing)
            assert next(versions).number == 1
            assert failed


def test_what_is_kept_of_changes_has_a_limit_and_is_made_again_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    encode, put = weights.encode, weights.HeldPieces.put
    pieces: list[weights.HeldPiece] = []

    def counted(old: Any, new: Any, number: int) -> Any:
        made.append(number)
        return encode(old, new, number)

    def seen(held: weights.HeldPieces, piece: weights.HeldPiece) -> None:
        pieces.append(piece)
        put(held, piece)

    monkeypatch.setattr(weights, "encode", counted)
    monkeypatch.setattr(weights.HeldPieces, "put", seen)
    monkeypatch.setattr(weights, "MOST_LINK_BYTES", 1)
    with running_job() as job, reader(job) as versions:
        model, mine = nn.Linear(400, 40), nn.Linear(400, 40)
        cluster, optimizer = published(job, model)
        next(versions)
        for number in (2, 3, 4):
            model.weight.grad, model.bias.grad = torch.zeros(40, 400), torch.zeros(40)
            model.weight.grad[0, number] = 1.0
            optimizer.step()
            cluster.publish("policy", optimizer, step=number, wait=True)
            next(versions)
        assert made == [2, 3, 4]
        assert [len(piece.links) for piece in pieces] == [0, 0, 0, 1]
        monkeypatch.setattr(weights, "MOST_LINK_BYTES", 1 << 20)
        with reader(job) as others:
            others.fetch(2)
            next(others).apply_(mine)
            assert others.delta_bytes > 0
        assert bits(mine) == bits(model)
        assert made == [2, 3, 4, 3]
        cluster.publish("policy", optimizer, step=5, keep=1, wait=True)
        cluster.publish("policy", optimizer, step=6, keep=1, wait=True)
        assert [len(piece.links) for piece in pieces[:4]] == [0, 0, 0, 0]


def test_an_unknown_name_is_refused_where_a_version_is_asked_for_and_waited_for_otherwise() -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net())
        with reader(job, "polcy", follow=False) as versions:
            assert list(versions) == []
        with reader(job, "polcy") as versions:
            with pytest.raises(UnknownVersion, match="nothing is published under the name 'polcy'") as told:
                versions.fetch(1)
            assert told.value.expected == "policy"
            cluster.publish("polcy", optimizer, step=2, wait=True)
            assert next(versions).step == 2
        with pytest.raises(UnknownVersion, match="nothing is published under"):
            job.client.pin_weights("other", 1, "me", 60.0)


def test_a_reader_goes_on_with_a_whole_version_where_the_one_it_has_is_not_the_one_of_the_job() -> None:
    with running_job(shards=2) as job, reader(job) as versions:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        base = next(versions)._whole
        full = versions.full_bytes
        other = replace(base, manifests=dict.fromkeys(base.manifests, b"?" * 16))
        versions._reader._base = other
        step(model, optimizer)
        cluster.publish("policy", optimizer, step=2, wait=True)
        next(versions).apply_(mine)
        assert bits(mine) == bits(model)
        assert (versions.delta_bytes, versions.full_bytes) == (0, 2 * full)
        versions._reader._base = replace(versions._reader._base, values={})
        step(model, optimizer)
        cluster.publish("policy", optimizer, step=3, wait=True)
        next(versions).apply_(mine)
        assert bits(mine) == bits(model)
        assert (versions.delta_bytes, versions.full_bytes) == (0, 3 * full)
