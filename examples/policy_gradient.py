"""A policy gradient with one trainer and actors that follow its policy: reinforcement learning on published weights.

ps-run --shards 2 --workers 1 --evaluators 4 examples/policy_gradient.py --expect-return 0.8

The trainer publishes its policy after each update. Actors are readers: each follows the newest version in a thread,
plays episodes with it, and sends them to the trainer, whose address is in the metadata of the versions. The walk is
along a corridor: the right end pays 1, the left end nothing, and each step costs a little. REINFORCE (Williams, 1992)
learns to go right.
"""

import argparse
import os
import queue
import sys
import threading
from multiprocessing.connection import Client, Connection, Listener

import torch
from torch import Tensor, nn

import ps_worker

CELLS, MOST_STEPS, COST = 9, 40, 0.01
DISCOUNT = 0.98

#: Number of the version it was played with, cells, actions, discounted returns, and what it paid.
Episode = tuple[int, Tensor, Tensor, Tensor, float]


class Policy(nn.Module):
    """Logits of going left and right, by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(CELLS, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, cells: Tensor) -> Tensor:
        """The logits [n, 2] of some cells [n]."""
        logits: Tensor = self.body(nn.functional.one_hot(cells, CELLS).float())
        return logits


@torch.no_grad()
def play(policy: Policy, number: int) -> Episode:
    """One walk, from the middle."""
    cell, cells, actions, rewards = CELLS // 2, [], [], []
    while 0 < cell < CELLS - 1 and len(cells) < MOST_STEPS:
        action = int(torch.distributions.Categorical(logits=policy(torch.tensor(cell))).sample())
        cells.append(cell)
        actions.append(action)
        cell += 1 if action else -1
        rewards.append((1.0 if cell == CELLS - 1 else 0.0) - COST)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        returns.append(total)
    return number, torch.tensor(cells), torch.tensor(actions), torch.tensor(returns[::-1]), sum(rewards)


def act() -> int:
    """Play with the newest policy until the trainer has ended."""
    versions: queue.SimpleQueue[ps_worker.Version | None] = queue.SimpleQueue()

    def follow() -> None:
        for version in ps_worker.subscribe("policy"):
            versions.put(version)
        versions.put(None)

    threading.Thread(target=follow, daemon=True).start()
    policy, version, trainer = Policy(), versions.get(), None
    while version is not None:
        version.apply_(policy)
        number = version.number
        try:
            if trainer is None:
                host, port = version.metadata["episodes"]
                trainer = Client((host, port), authkey=str(version.metadata["key"]).encode())
            while versions.empty():
                trainer.send(play(policy, number))
                trainer.recv()  # the trainer has taken it
        except (EOFError, OSError):
            return 0
        version = versions.get()
    return 0


def episodes_of(listener: Listener) -> "queue.Queue[Episode]":
    """What all actors send."""
    played: queue.Queue[Episode] = queue.Queue(32)

    def take(actor: Connection) -> None:
        try:
            while True:
                played.put(actor.recv())
                actor.send(None)
        except (EOFError, OSError):
            actor.close()

    def accept() -> None:
        try:
            while True:
                threading.Thread(target=take, args=(listener.accept(),), daemon=True).start()
        except OSError:
            return  # closed

    threading.Thread(target=accept, daemon=True).start()
    return played


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """Update the policy from what actors play. Returns the exit code."""
    torch.manual_seed(args.seed)
    policy = Policy()
    optimizer = cluster.optimizer(torch.optim.Adam, policy, lr=args.lr)
    key = os.urandom(16).hex()
    paid = 0.0
    with Listener(("127.0.0.1", 0), authkey=key.encode()) as listener:
        played, facts = episodes_of(listener), {"episodes": listener.address, "key": key}
        newest = cluster.publish("policy", optimizer, step=0, metadata=facts)
        for update in range(1, args.updates + 1):
            batch = [played.get() for _ in range(args.episodes)]
            cells, actions, returns = (torch.cat([episode[part] for episode in batch]) for part in (1, 2, 3))
            log_probabilities = torch.distributions.Categorical(logits=policy(cells)).log_prob(actions)
            loss = -(log_probabilities * (returns - returns.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            paid = sum(episode[4] for episode in batch) / len(batch)
            behind = sum(newest - episode[0] for episode in batch) / len(batch)
            newest = cluster.publish("policy", optimizer, step=update, metadata=facts)
            cluster.report(paid=paid, behind=behind)
    print(f"an episode pays {paid:.3f} (expected at least {args.expect_return})", flush=True)
    return int(paid < args.expect_return)


def main() -> int:
    """Read the flags; train, or act."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--episodes", type=int, default=16, help="of one update")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expect-return", type=float, default=0.0)
    args = parser.parse_args()
    with ps_worker.connect() as cluster:
        return act() if cluster.role == "evaluator" else train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
