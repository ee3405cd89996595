"""Checkpoints of a running job: one point of all shards, restored on any number of them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ps_protocol.cluster.model_status import ModelPosition
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import DamagedData, InvalidRequest, ModelMismatch, NotReady, Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.jobs import checkpoints
from ps_server.coordinator.jobs.quiesce import QuiesceLost, check_same_position
from ps_server.shard.quiesce import Quiescence
from ps_server.shard.registry import Registry
from ps_worker import Cluster
from tests.end_to_end.training import assert_bitwise, assert_close, batches, loss_of, net, run_workers, values
from tests.support.length import choose, few, paired
from tests.support.seeds import drawn_seed
from tests.support.shards import coordinator_stub, error_of, wait_until
from tests.worker.jobs import Job, running_job

STEPS = 12
MODES = [Consistency(Mode.ASYNC), Consistency(Mode.SSP, staleness=2), Consistency(Mode.SYNC)]
OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.01}}


def train(cluster: Cluster, steps: range, optimizer: str = "Adam", *, started: bool = False) -> list[torch.Tensor]:
    """One worker's part of the same ``steps`` of one training."""
    model = net(seed=5)
    made = cluster.optimizer(getattr(torch.optim, optimizer), model, **OPTIMIZERS[optimizer])
    data = batches(STEPS * 2, cluster.world_size)
    for step in steps:
        made.zero_grad()
        loss_of(model, data[step][cluster.rank]).backward()
        made.step()
    made.pull()
    return values(model)


def sync(workers: int, **fields):
    return {"workers": workers, "consistency": Consistency(Mode.SYNC), **fields}


def halves(tmp_path, shards: int, optimizer: str) -> tuple[Checkpoint, list[torch.Tensor]]:
    """A checkpoint after STEPS steps of two workers in sync, and what 2 · STEPS undisturbed ones give."""
    with running_job(shards, **sync(2)) as job:
        undisturbed = run_workers(job, 2, lambda cluster: train(cluster, range(2 * STEPS), optimizer))[0]
    with running_job(shards, **sync(2), checkpoints=CheckpointConfig(tmp_path)) as job:
        run_workers(job, 2, lambda cluster: train(cluster, range(STEPS), optimizer))
        _, size, _ = job.client.checkpoint()
        assert size > 0
    return Checkpoint.open(committed(tmp_path)[-1]), undisturbed


@pytest.mark.parametrize(
    ("optimizer", "shards"), few(paired(list(OPTIMIZERS), [(2, 3), (3, 2), (2, 2), (2, 1)]), 2), ids=str
)
def test_a_job_goes_on_from_a_checkpoint_on_any_number_of_shards(tmp_path, optimizer, shards):
    before, after = shards
    saved, undisturbed = halves(tmp_path, before, optimizer)
    with running_job(after, **sync(2), saved=saved) as job:
        resumed = run_workers(job, 2, lambda cluster: train(cluster, range(STEPS, 2 * STEPS), optimizer))[0]
    if before == after:
        assert_bitwise(resumed, undisturbed)
    else:
        assert_close(resumed, undisturbed)


def test_a_restored_job_knows_its_version_and_the_optimizer_state(tmp_path):
    saved, _ = halves(tmp_path, 2, "Adam")
    with running_job(1, 1, saved=saved) as job, job.cluster(rank=0) as cluster:
        made = cluster.optimizer(torch.optim.Adam, net(), **OPTIMIZERS["Adam"])
        assert made.version == STEPS
        assert {int(state["step"]) for state in made.state_dict()["state"].values()} == {STEPS}


def test_the_checkpoint_that_a_job_began_with_stays_among_its_own(tmp_path):
    saved, _ = halves(tmp_path, 1, "SGD")
    with running_job(1, 1, saved=saved, checkpoints=CheckpointConfig(tmp_path, keep=1, restored=saved.folder)) as job:
        run_workers(job, 1, lambda cluster: train(cluster, range(STEPS, STEPS + 1), "SGD"))
        newest = [job.client.checkpoint()[0] for _ in range(3)][-1]
    assert [str(folder) for folder in committed(tmp_path)] == [str(saved.folder), str(newest)]


def test_safetensors_reads_the_model_of_a_checkpoint_directly(tmp_path):
    with running_job(2, 1, checkpoints=CheckpointConfig(tmp_path)) as job:
        (served,) = run_workers(job, 1, lambda cluster: train(cluster, range(3)))
        job.client.checkpoint()
    found = {}
    for path in sorted(tmp_path.glob("*/model/model-*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
    assert_bitwise([found[name] for name, _ in net().named_parameters()], served)
    assert (tmp_path / "checkpoint-00000001" / "model" / "model.safetensors.index.json").exists()
    assert load_file(next(tmp_path.glob("*/model/optimizer-*.safetensors")))


@pytest.mark.parametrize("mode", few(MODES, 2), ids=str)
def test_a_checkpoint_under_training_holds_each_push_on_every_shard_or_on_none(tmp_path, mode):
    """Every worker adds 1 to every element with each push: in one cut all elements are equal to the version."""
    seed = drawn_seed()
    done, started = threading.Event(), threading.Barrier(4)

    def work(cluster: Cluster) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(7, 3)), torch.nn.Parameter(torch.zeros(50))]
        made = cluster.optimizer(torch.optim.SGD, parameters, lr=1.0)
        started.wait()
        chance = random.Random(seed + cluster.rank)
        while not done.is_set():
            for parameter in parameters:
                parameter.grad = -torch.ones_like(parameter)
            made.step()
            threading.Event().wait(chance.random() / 200)

    config = CheckpointConfig(tmp_path, keep=100)
    with running_job(3, 3, consistency=mode, checkpoints=config) as job, ThreadPoolExecutor(1) as pool:
        training = pool.submit(run_workers, job, 3, work)
        try:
            started.wait(60)
            for _ in range(choose(8, 5)):
                job.client.checkpoint()
        finally:
            done.set()
        training.result()
    for folder in committed(tmp_path):
        checkpoint = Checkpoint.open(folder)
        model = checkpoint.model("model")
        versions = {facts["tracker"]["version"] for facts in model.facts}
        elements = set()
        for path in (folder / model.folder).glob("model-*.safetensors"):
            elements |= {value for tensor in load_file(path).values() for value in tensor.flatten().tolist()}
        assert elements == versions
        assert len(versions) == 1


def test_a_checkpoint_is_made_although_a_shard_hears_later_than_others_that_the_workers_have_left(
    tmp_path, monkeypatch
):
    failed: list[QuiesceLost] = []
    held: list[Callable[[], object]] = []
    on_view = Registry.on_view

    def heard(registry: Registry, view: ClusterView) -> None:
        leaves = len(view.live(Role.WORKER)) < len(registry.view.live(Role.WORKER))
        if registry.context.shard == 1 and len(failed) < 4 and leaves:
            loop = asyncio.get_running_loop()
            held.append(partial(loop.call_soon_threadsafe, on_view, registry, view))
        else:
            on_view(registry, view)

    def check(reports: Iterable[Sequence[ModelPosition]]) -> None:
        try:
            check_same_position(reports)
        except QuiesceLost as error:
            failed.append(error)
            if len(failed) == 4:
                for tell in held:
                    tell()
            raise

    with running_job(2, **sync(2), checkpoints=CheckpointConfig(tmp_path)) as job:
        monkeypatch.setattr(Registry, "on_view", heard)
        monkeypatch.setattr(checkpoints, "check_same_position", check)
        run_workers(job, 2, lambda cluster: train(cluster, range(STEPS), "SGD"))
        folder, _, _ = job.client.checkpoint()
        assert len(failed) == 4
        assert Path(folder) in committed(tmp_path)


def test_training_goes_on_when_the_caller_of_a_quiesce_has_gone(tmp_path):
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        parameter = torch.nn.Parameter(torch.zeros(4))
        made = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0)
        parameter.grad = torch.ones(4)
        made.step()
        stub = shard_stub(job, cluster)
        stub.Pause(pb.PauseRequest(quiesce="lost", seconds=0.3))
        made.step()
        assert parameter[0].item() == -2
        stub.Pause(pb.PauseRequest(quiesce="given up", seconds=60))
        stub.Resume(pb.ResumeRequest(quiesce="given up"))
        made.step()


def shard_stub(job: Job, cluster: Cluster) -> shard_pb2_grpc.ShardStub:
    """As the coordinator has it."""
    driver = job.checkpoints._driver
    (token,) = driver.shard_tokens.values()
    return coordinator_stub(cluster._session.shard_channel(0), driver.view.live(Role.SHARD)[0].incarnation, token)


def test_a_checkpoint_goes_into_a_running_job(tmp_path):
    with running_job(2, 1, checkpoints=CheckpointConfig(tmp_path)) as job, job.cluster(rank=0) as cluster:
        parameter = torch.nn.Parameter(torch.zeros(40))
        made = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, momentum=0.5)
        parameter.grad = torch.ones(40)
        made.step()
        job.client.checkpoint()
        made.step()
        expected = parameter.detach().clone()
        made.step()
        folder, models = job.client.restore_checkpoint()
        assert models == ["model"]
        assert folder.endswith("checkpoint-00000001")
        made.step()
        assert torch.equal(parameter.detach(), expected)
        assert made.version == 4


def test_a_shard_takes_no_checkpoint_whose_request_was_held_up_until_its_quiesce_was_over(tmp_path):
    """It would go back alone, and nobody would hear of it."""
    with running_job(1, 1, checkpoints=CheckpointConfig(tmp_path)) as job, job.cluster(rank=0) as cluster:
        parameter = torch.nn.Parameter(torch.zeros(4))
        made = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0)
        parameter.grad = torch.ones(4)
        made.step()
        folder, _, _ = job.client.checkpoint()
        made.step()
        stub = shard_stub(job, cluster)
        late = pb.RestoreRequest(folder=folder, quiesce="over")
        stub.Pause(pb.PauseRequest(quiesce="over", seconds=60))
        stub.Resume(pb.ResumeRequest(quiesce="over"))
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Restore(late)
            assert isinstance(error_of(refused.value), Unavailable)
            stub.Pause(pb.PauseRequest(quiesce="another", seconds=60))
        made.pull()
        assert parameter[0].item() == -2
        stub.Restore(pb.RestoreRequest(folder=folder, quiesce="another"))
        stub.Resume(pb.ResumeRequest(quiesce="another"))
        made.pull()
        assert parameter[0].item() == -1


def test_a_checkpoint_that_only_some_shards_take_is_not_called_restored(tmp_path, monkeypatch):
    with running_job(2, 1, checkpoints=CheckpointConfig(tmp_path)) as job, job.cluster(rank=0) as cluster:
        cluster.optimizer(torch.optim.SGD, [torch.nn.Parameter(torch.zeros(40))], lr=1.0)
        job.client.checkpoint()
        with monkeypatch.context() as patch:
            models = Quiescence._models
            patch.setattr(Quiescence, "_models", lambda self: [] if self._shard == 1 else models(self))
            with pytest.raises(NotReady, match="does not have its first values on every shard yet; shard: 1"):
                job.client.restore_checkpoint()
        assert job.client.restore_checkpoint()[1] == ["model"]


def test_what_stands_in_the_way_of_a_checkpoint_is_said_and_leaves_no_trace(tmp_path):
    with running_job(1, 1) as job, pytest.raises(InvalidRequest, match="no place for checkpoints"):
        job.client.checkpoint()
    with running_job(2, 1, start_shards=1, checkpoints=CheckpointConfig(tmp_path)) as job:
        with pytest.raises(NotReady, match="a shard is missing; shard: 1"):
            job.client.checkpoint()
        with pytest.raises(InvalidRequest, match="there is no checkpoint yet"):
            job.client.restore_checkpoint()
    with running_job(1, 1, checkpoints=CheckpointConfig(tmp_path)) as job:
        with pytest.raises(NotReady, match="no model has values yet"):
            job.client.checkpoint()
        with pytest.raises(InvalidRequest, match="is not a complete checkpoint"):
            job.client.restore_checkpoint(str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path):
    saved, _ = halves(tmp_path, 2, "Adam")
    with running_job(2, 1, saved=saved) as job, job.cluster(rank=0) as cluster:
        with pytest.raises(ModelMismatch, match="shape"):
            cluster.optimizer(torch.optim.Adam, torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 3)))
        with pytest.raises(ModelMismatch, match="has no model 'other'"):
            cluster.optimizer(torch.optim.Adam, net(), name="other")


def test_a_damaged_checkpoint_reaches_the_worker_as_one_clear_error(tmp_path):
    saved, _ = halves(tmp_path, 1, "Adam")
    victim = next(saved.folder.glob("model/model-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with (
        running_job(1, 1, saved=saved) as job,
        job.cluster(rank=0) as cluster,
        pytest.raises(DamagedData, match=victim.name),
    ):
        cluster.optimizer(torch.optim.Adam, net(), **OPTIMIZERS["Adam"])


def test_checkpoints_are_made_at_the_interval_and_at_the_end_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.coordinator.times.LOOK_SECONDS", 0.01)
    config = CheckpointConfig(tmp_path, seconds=0.05, keep=2)
    told = []
    with running_job(1, 1, checkpoints=config) as job:
        job.checkpoints._on_made = told.append
        job.run_checkpoints()
        with job.cluster(rank=0) as cluster:
            parameter = torch.nn.Parameter(torch.zeros(4))
            made = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0)
            parameter.grad = -torch.ones(4)
            made.step()
            wait_until(lambda: len(committed(tmp_path)) == 2 and committed(tmp_path)[0].name > "checkpoint-00000003")
            for _ in range(5):
                made.step()
        wait_until(lambda: job.view.finished)
        wait_until(lambda: job.checkpoints.settled)  # none is removed from here on
        wait_until(lambda: read(committed(tmp_path)[-1]) == 6)
        wait_until(lambda: len(committed(tmp_path)) == 2)
        wait_until(lambda: list(told[-1].there) == committed(tmp_path))
    # A program that shows them is told which are left.
    assert [each.there[-1] for each in told] == [each.folder for each in told]
    assert max(len(each.there) for each in told) == 2


def read(folder) -> float:
    model = Checkpoint.open(folder).model("model")
    return next(iter(load_file(next((folder / model.folder).glob("model-*.safetensors"))).values()))[0].item()


def test_every_worker_role_and_number_of_shards_reads_the_same_values(tmp_path):
    saved, _ = halves(tmp_path, 2, "Adam")
    from ps_protocol.model.layout import Layout
    from ps_server.state.region import Region

    shard_map = saved.model("model").shard_map
    for shard in range(2):
        layout = Layout.of(shard_map, shard)
        region = Region(layout)
        read_values(saved, layout, region.bytes)
        assert {key.name for key, _ in read_state(saved, layout)} == {"step", "exp_avg", "exp_avg_sq"}
    with running_job(2, 1, saved=saved) as job, job.cluster(rank=0) as cluster:
        model, followed = net(), net(seed=9)
        cluster.optimizer(torch.optim.Adam, model, **OPTIMIZERS["Adam"])
        next(iter(job.cluster(Role.EVALUATOR).follow(followed)))
        assert_bitwise(values(followed), values(model))
