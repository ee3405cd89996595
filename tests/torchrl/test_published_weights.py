"""Collectors of TorchRL, in this process and in their own, act with the versions that a trainer publishes.

``pip install 'torch-ps[torchrl]'`` makes them run: TorchRL is not among what development installs.
"""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import ConfigError, InvalidRequest, ModelMismatch, Unavailable
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job

pytestmark = [
    pytest.mark.skipif(find_spec("torchrl") is None, reason="not installed: pip install 'torch-ps[torchrl]'"),
    # Of TorchRL's own imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def env() -> Any:
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    return ContinuousActionVecMockEnv()


def policy(width: int | None = None) -> Any:
    from tensordict.nn import TensorDictModule

    made = env()
    seen, acts = made.observation_spec["observation"].shape[-1], width or made.action_spec.shape[-1]
    return TensorDictModule(nn.Linear(seen, acts), in_keys=["observation"], out_keys=["action"])


class Trainer:
    """A worker of a job that trains ``policy`` with what a collector brings, and publishes it."""

    def __init__(self, job: Job) -> None:
        self.policy = policy()
        self.cluster = job.cluster()
        self.optimizer = self.cluster.optimizer(torch.optim.SGD, self.policy, lr=0.1)
        self.losses: list[float] = []

    def publish(self) -> int:
        return self.cluster.publish("policy", self.optimizer, step=len(self.losses), wait=True)

    def train(self, batch: Any) -> None:
        acted = batch["action"].clone()
        actions = self.policy(batch)["action"]
        # What acted was of this version: only the order of sums may differ.
        torch.testing.assert_close(acted, actions.detach())
        loss = (actions - 1.0).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def scheme(job: Job, **options: Any) -> Any:
    from ps_worker.torchrl import PublishedWeightSyncScheme

    return PublishedWeightSyncScheme(coordinator=job.address, **options)


def test_a_collector_trains_with_the_versions_that_it_follows():
    from torchrl.collectors import Collector

    with running_job(shards=2) as job:
        trainer = Trainer(job)
        trainer.publish()
        follows = scheme(job)
        collector = Collector(
            env, policy(), frames_per_batch=8, total_frames=64, weight_recv_schemes={"policy": follows}
        )
        try:
            for batch in collector:
                trainer.train(batch)
                number = trainer.publish()
                wait_until(lambda number=number: follows.receive() or follows.version == number)
        finally:
            collector.shutdown()
            follows.shutdown()
    assert len(trainer.losses) == 8
    assert trainer.losses[-1] < trainer.losses[0]


def test_a_version_is_taken_between_two_calls_of_the_policy():
    with running_job(shards=1) as job:
        trainer, mine, follows = Trainer(job), policy(), scheme(job)
        trainer.publish()
        follows.init_on_receiver(model_id="policy", model=mine)
        follows.connect()
        assert follows.version == 1
        before = mine.module.bias.clone()
        trainer.train(mine(env().reset()))
        trainer.publish()
        wait_until(lambda: follows._follower._arrived is not None)
        assert torch.equal(mine.module.bias, before)
        mine(env().reset())
        assert torch.equal(mine.module.bias, trainer.policy.module.bias)
        assert not torch.equal(mine.module.bias, before)
        assert follows.version == 2
        thread = follows._follower._thread
        follows.shutdown()
        follows.shutdown()
        wait_until(lambda: not thread.is_alive())
        trainer.publish()
        mine(env().reset())
        assert follows.version == 0


def test_what_ends_the_following_is_raised_at_every_call_from_then_on():
    with running_job(shards=1) as job:
        trainer, mine, follows = Trainer(job), policy(), scheme(job)
        trainer.publish()
        follows.init_on_receiver(model_id="policy", model=mine)
        follows.connect()
        with follows._follower._lock:
            follows._follower._failed = Unavailable("the coordinator does not answer")
        for _ in range(2):
            with pytest.raises(Unavailable):
                mine(env().reset())
        follows.shutdown()
        mine(env().reset())


@pytest.mark.long
def test_collectors_in_processes_of_their_own_train_with_what_is_published():
    from torchrl.collectors import MultiSyncCollector

    with running_job(shards=2) as job:
        trainer = Trainer(job)
        sends = scheme(job, publish=trainer.publish)
        collector = MultiSyncCollector(
            [env, env], policy(), frames_per_batch=16, total_frames=16, weight_sync_schemes={"policy": sends}
        )
        try:
            for batch in collector:
                trainer.train(batch)
                collector.update_policy_weights_()
        finally:
            collector.shutdown()
    assert len(trainer.losses) == 1


def test_a_policy_without_values_gets_those_of_the_version_and_one_that_stays_without_is_refused():
    with running_job(shards=1) as job:
        trainer = Trainer(job)
        trainer.publish()
        empty = policy().to("meta")
        follows = scheme(job)
        follows.init_on_receiver(model_id="policy", model=empty)
        follows.connect()
        assert torch.equal(empty.module.weight, trainer.policy.module.weight)
        follows.shutdown()
        empty = policy().to("meta")
        empty.register_buffer("noise", torch.empty(3, device="meta"))
        follows = scheme(job)
        follows.init_on_receiver(model_id="policy", model=empty)
        with pytest.raises(ModelMismatch, match="variable: noise"):
            follows.connect()


def test_what_cannot_be_followed_or_published_is_refused():
    with running_job(shards=1) as job:
        trainer, reads = Trainer(job), scheme(job)
        trainer.publish()
        with pytest.raises(ConfigError, match="nothing to publish with"):
            reads.send()
        with pytest.raises(InvalidRequest, match="does not follow"):
            reads.receive()
        with pytest.raises(ConfigError, match="no transport"):
            reads.create_transport()
        with pytest.raises(ConfigError, match="no module 'policy'"):
            reads.init_on_receiver(model_id="policy", model=None)
        other, narrow = scheme(job), policy(width=3)
        other.init_on_receiver(model_id="policy", model=narrow)
        with pytest.raises(ModelMismatch):
            other.connect()
        sends = scheme(job, publish=trainer.publish)
        copied = pickle.loads(pickle.dumps(sends))
        assert (copied._publish, copied._subscribe.args) == (None, ("policy",))
