"""Optimizers that are closed in the middle of a job, and others for their parameters. In one process, about 2 s."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.training import assert_bitwise, assert_close, batches, concatenated, loss_of, net, train, values
from tests.end_to_end.training import run_workers as run
from tests.worker.jobs import running_job

STEPS = batches(6, workers=2)


@pytest.mark.parametrize("adopted", [True, False])
def test_parameters_of_a_closed_optimizer_are_trained_by_another(adopted):
    """A second model is trained on: nobody waits for steps of the closed one."""

    def work(cluster):
        model, other = net(), net(seed=5)
        steps = [step[cluster.rank] for step in STEPS]
        first = cluster.optimizer(torch.optim.AdamW, model, lr=0.05)
        lasting = cluster.optimizer(torch.optim.SGD, other, lr=0.1)
        train(model, first, steps[:3])
        train(other, lasting, steps[:3])
        first.close()
        if adopted:
            second = cluster.adopt(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        else:
            second = cluster.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        assert second.name == "model-2"
        train(model, second, steps[3:])
        train(other, lasting, steps[3:])
        cluster.barrier()
        return values(model), values(other)

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        found = run(job, 2, work)
    model, other = net(), net(seed=5)
    steps = [concatenated(step) for step in STEPS]
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05), steps[:3])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps[3:])
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), steps)
    for own, lasting in found:
        assert_close(own, values(model))
        assert_close(lasting, values(other))


def test_a_closed_optimizer_says_so_and_its_name_stays_taken():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = net()
        model[0].requires_grad_(False)
        optimizer = cluster.adopt(torch.optim.SGD(model[2].parameters(), lr=0.1), model, name="net")
        optimizer.add_param_group({"params": list(model[0].requires_grad_(True).parameters())})
        train(model, optimizer, [STEPS[0][0]])
        last = values(model)
        optimizer.close()
        optimizer.close()
        assert optimizer.name == "net"
        assert repr(optimizer).startswith("SGD, closed (\nParameter Group 0\n")
        loss_of(model, STEPS[0][0]).backward()
        calls = [optimizer.step, optimizer.zero_grad, optimizer.pull, optimizer.assign, optimizer.state_dict]
        for call in [*calls, lambda: optimizer.load_state_dict({}), lambda: optimizer.last, lambda: optimizer.version]:
            with pytest.raises(UnsupportedOptimizer, match="optimizer of model 'net' was closed") as caught:
                call()
            assert "to a new one" in caught.value.remedy
        with pytest.raises(UnsupportedOptimizer, match="runs on the shards already"):
            cluster.adopt(optimizer, model)
        with pytest.raises(ConfigError, match="named 'net' was closed"):
            cluster.optimizer(torch.optim.SGD, model, lr=0.1, name="net")
        assert_bitwise(values(model), last)
        again = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, again, [STEPS[1][0]])
        assert again.version == 1
