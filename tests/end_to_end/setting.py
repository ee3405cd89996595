"""Programs that set values of their model, and runs of them in one process and on a cluster."""

from __future__ import annotations

import io

import torch
from torch import nn

from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end import training
from tests.end_to_end.training import batches, loss_of, net, run_workers
from tests.end_to_end.training import values as values_of
from tests.worker.jobs import running_job

STEPS = [step[0] for step in batches(6)]
WEIGHTS = net(seed=9).state_dict()


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return file


def train(model, optimizer, steps=STEPS, after=lambda model: None):
    training.train(model, optimizer, steps, after)


def resume(model, optimizer):
    """As ImageNet's example with --resume, HF's Trainer and Accelerate's load_state: all of it after the optimizer."""
    model.load_state_dict(WEIGHTS)
    train(model, optimizer)


def load_best(model, optimizer):
    """As HF's Trainer with load_best_model_at_end, and then trained on."""
    train(model, optimizer, STEPS[:2])
    best = saved(model)
    train(model, optimizer, STEPS[2:4])
    model.load_state_dict(torch.load(best))
    train(model, optimizer, STEPS[4:])


def clamp_data(model, optimizer):
    def clamp(model):
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    train(model, optimizer, after=clamp)


def clamp_in_place(model, optimizer):
    @torch.no_grad()
    def clamp(model):
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)

    train(model, optimizer, after=clamp)


def renormalise(model, optimizer):
    def normalise(model):
        weight = model[0].weight
        weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)

    train(model, optimizer, after=normalise)


def init_late(model, optimizer):
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(model[2].weight, generator=generator)
    nn.init.zeros_(model[2].bias)
    train(model, optimizer)


def write_through_numpy(model, optimizer):
    def halve(model):
        model[0].weight.detach().numpy()[0] *= 0.5

    train(model, optimizer, after=halve)


def lookahead(model, optimizer):
    """The usual code of it: slow weights, that the fast ones are set to after every fifth step."""
    slow = [p.data.clone() for p in model.parameters()]
    for number in range(2):
        train(model, optimizer, STEPS[: 5 - number])
        for kept, fast in zip(slow, model.parameters(), strict=True):
            kept.add_(0.5 * (fast.data - kept))
            fast.data.copy_(kept)
    train(model, optimizer, STEPS[4:])


def polyak_late(model, optimizer):
    average = [p.data.clone() for p in model.parameters()]
    train(model, optimizer)
    for kept, p in zip(average, model.parameters(), strict=True):
        kept.lerp_(p.data, 0.3)
        p.data = kept.clone()
    train(model, optimizer, STEPS[:1])


def layer_anew(model, optimizer):
    train(model, optimizer)
    fresh = net(seed=5)
    model[2].weight.data.copy_(fresh[2].weight.data)
    model[2].bias.data.zero_()
    train(model, optimizer, STEPS[:1])


def clamp_late(model, optimizer):
    train(model, optimizer)
    clamp_data(model, optimizer)


def halve_once(model, optimizer):
    train(model, optimizer)
    for p in model.parameters():
        p.data *= 0.5
    train(model, optimizer, STEPS[:1])


def numpy_once(model, optimizer):
    train(model, optimizer)
    for p in model.parameters():
        p.detach().numpy()[...] += 0.25
    train(model, optimizer, STEPS[:1])


def share_memory(model, optimizer):
    """As programs with processes of their own do: all storages move, those of gradients too."""
    train(model, optimizer, STEPS[:2])
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, STEPS[2]).backward()
    model.share_memory()
    optimizer.step()
    for batch in STEPS[3:]:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()


PROGRAMS = [resume, load_best, clamp_data, clamp_in_place, renormalise, init_late, write_through_numpy]

#: They set values past torch in the middle of training.
LATE_PROGRAMS = [lookahead, polyak_late, layer_anew, clamp_late, halve_once, numpy_once]


def alone(program, steps=STEPS, make=net):
    model = make()
    program(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return values_of(model)


def on_cluster(program, mode=Mode.ASYNC, *, make=net, workers=1, **arguments):
    def work(cluster):
        model = make()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, **arguments)
        program(model, optimizer)
        return values_of(model)

    with running_job(2, workers, consistency=Consistency(mode)) as job:
        return run_workers(job, workers, work)


class Words(nn.Module):
    """An embedding whose rows are renormalised as they are looked up."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(9, 4, max_norm=1.0, _weight=torch.randn(9, 4, generator=generator) * 3)
        self.head = nn.Linear(4, 2)
        nn.init.constant_(self.head.weight, 0.3)
        nn.init.zeros_(self.head.bias)
