"""Models that are released in the middle of a job: on every shard, in checkpoints, by name. About 6 s."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import ps_worker
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ModelReleased, NotReady, UnknownModel, UnsupportedOptimizer
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.cli.options.checkpoint import CheckpointConfig
from tests.end_to_end.training import assert_bitwise, batches, net, train, values
from tests.end_to_end.training import run_workers as run
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job, together

STEPS = batches(6, workers=2)


def held_bytes(job: Job) -> int:
    """Of all shards, as they tell in their heartbeats."""
    members = job.client.get_status().members
    return sum(member.stats.held_bytes for member in members if member.member.role is Role.SHARD)


def wait_for_models(job: Job, *models: str) -> None:
    """Until the shards hold the bytes of these models and no others."""
    maps = [job.client.get_shard_map(model) for model in models]
    nbytes = sum(Layout.of(each, shard).region_bytes for each in maps for shard in range(each.shards))
    wait_until(lambda: held_bytes(job) == nbytes)


def test_a_training_that_is_made_twice_in_one_job_is_told_that_it_goes_on_unless_it_has_a_name(caplog):
    def trained(name: str | None = None, *, releases: bool = False, model_name: str | None = None):
        with ps_worker.connect(job.address, rank=0, device="cpu", name=name) as cluster:
            model = net()
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, name=model_name)
            train(model, optimizer, [step[0] for step in STEPS])
            said = [record.getMessage() for record in caplog.records if record.name == "ps_worker"]
            found = optimizer.name, values(model), said
            caplog.clear()
            if releases:
                optimizer.close(release=True)
            return found

    with running_job(2, 1) as job, caplog.at_level(logging.WARNING, "ps_worker"):
        _, first, said = trained()
        assert said == []
        name, second, (said,) = trained()
        assert name == "model"
        assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert "'model' goes on: this process trained it before" in said
        assert "6 updates" in said
        assert "connect(name=...)" in said
        # By a name of the connection, or of the model; or the one before was released.
        assert trained("second")[0] == "second"
        for _ in range(2):
            name, again, said = trained(model_name="third", releases=True)
            assert (name, said) == ("third", [])
            assert_bitwise(again, first)


def test_a_released_model_is_dropped_and_its_name_is_free(tmp_path):
    """The other model trains as if nothing happened, in sync; the next one of the name has another structure."""

    def work(cluster):
        lasting_model = net(seed=5)
        steps = [step[cluster.rank] for step in STEPS]
        lasting = cluster.optimizer(torch.optim.SGD, lasting_model, lr=0.1, name="lasting")
        train(lasting_model, lasting, steps[:2])
        if cluster.rank == 0:
            wait_for_models(job, "lasting")
        cluster.barrier()
        model = net()
        first = cluster.optimizer(torch.optim.AdamW, model, lr=0.05, name="net")
        train(model, first, steps[:2])
        cluster.barrier()
        if cluster.rank == 0:
            wait_for_models(job, "lasting", "net")
        first.close(release=True)
        first.close(release=True)
        with pytest.raises(UnsupportedOptimizer, match="'net' was closed"):
            first.step()
        if cluster.rank == 0:
            wait_for_models(job, "lasting")
            folder, _, _ = job.client.checkpoint()
            assert set(Checkpoint.open(Path(folder)).manifest.models) == {"lasting"}
            assert set(job.view.models) == {"lasting"}
        cluster.barrier()
        other = torch.nn.Linear(3, 7)
        second = cluster.optimizer(torch.optim.SGD, other, lr=0.1, name="net")
        begun = values(other)
        other(torch.ones(2, 3)).square().sum().backward()
        second.step()
        train(lasting_model, lasting, steps[2:])
        cluster.barrier()
        return begun, second.version, values(other), values(lasting_model)

    config = CheckpointConfig(tmp_path)
    with running_job(2, 2, consistency=Consistency(Mode.SYNC), checkpoints=config) as job:
        one, two = run(job, 2, work)
        assert job.view.released_models == {"net": 1}
        assert job.view.models == {"lasting": 1, "net": 2}
    for mine, others in zip(one, two, strict=True):
        if isinstance(mine, int):
            assert mine == others == 1
        else:
            assert_bitwise(mine, others)
    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:

        def alone(cluster):
            model = net(seed=5)
            train(model, cluster.optimizer(torch.optim.SGD, model, lr=0.1), [step[cluster.rank] for step in STEPS])
            cluster.barrier()
            return values(model)

        assert_bitwise(run(job, 2, alone)[0], one[3])


def test_a_model_in_use_is_not_released_and_the_workers_are_named():
    with running_job(1, 2) as job:
        first, second = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        models = [net(), net()]
        optimizers = [c.optimizer(torch.optim.SGD, m, lr=0.1) for c, m in zip((first, second), models, strict=True)]
        for number, user in ((0, "workers 0, 1"), (1, "worker 1")):
            with pytest.raises(NotReady, match=f"model 'model' is used by {user}") as caught:
                job.client.release_model("model")
            assert "optimizer.close()" in caught.value.remedy
            if number == 0:
                first.close()
        train(models[1], optimizers[1], [STEPS[0][1]])
        second.close()
        assert job.client.release_model("model") == 4 * sum(p.numel() for p in models[0].parameters())
        with pytest.raises(ModelReleased, match="'model' was released"):
            job.client.release_model("model")
        with pytest.raises(UnknownModel):
            job.client.release_model("mode")


def test_closed_first_and_released_by_hand_later():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, name="net")
        train(model, optimizer, [STEPS[0][0]])
        optimizer.close()
        job.client.release_model("net")
        wait_for_models(job)


def test_a_model_with_added_groups_and_one_with_tables():
    with running_job(2, 1) as job, job.cluster(rank=0) as cluster:
        model = net()
        model[0].requires_grad_(False)
        optimizer = cluster.adopt(torch.optim.SGD(model[2].parameters(), lr=0.1), model, name="net")
        optimizer.add_param_group({"params": list(model[0].requires_grad_(True).parameters())})
        table = ps_worker.rows.SGD(lr=0.1)
        rows = cluster.embedding(4, optimizer=table, name="words")
        head = torch.nn.Sequential(rows)
        sparse = cluster.optimizer(torch.optim.SGD, head, lr=0.1, name="rows")
        head(torch.tensor([1, 2, 3])).sum().backward()
        sparse.step()
        train(model, optimizer, [STEPS[0][0]])
        assert set(job.view.models) == {"net", "net+1", "rows"}
        optimizer.close(release=True)
        sparse.close(release=True)
        assert job.view.models == {}
        wait_for_models(job)
        wait_until(lambda: not any(m.stats.tables for m in job.client.get_status().members))


def test_an_evaluator_of_a_released_model_is_told():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, name="net")
        train(model, optimizer, [STEPS[0][0]])
        reader = job.cluster(Role.EVALUATOR)
        following = reader.follow(net(), "net", min_interval_seconds=0.01)
        assert next(following) == 1
        optimizer.close(release=True)
        with pytest.raises(ModelReleased, match="'net'"):
            next(following)
        # Another model under the name.
        again = cluster.optimizer(torch.optim.SGD, net(seed=7), lr=0.1, name="net")
        assert again.version == 0
        assert next(reader.follow(net(), "net", min_interval_seconds=0.01)) == 0
