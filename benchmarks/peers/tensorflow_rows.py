"""Rows of a variable on a TensorFlow parameter server: a program for a Python that has TensorFlow, not for this one.

``python tensorflow_rows.py ROWS DIM IDS`` starts a parameter server and a worker as processes of their own, and answers
each line on stdin, a number of steps, with a line of JSON: seconds of as many pulls (IDS different rows are gathered)
and of as many steps (pulled, and their gradients applied with SGD). Each is one ``tf.function``, scheduled on the
worker by a ``ClusterCoordinator`` and waited for. Imports nothing of torch-ps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

_RATE = 0.01
_BATCHES = 20


def free_address() -> str:
    """An address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def work(rows: int, dim: int, ids: int, addresses: dict[str, list[str]]) -> None:
    """Answer on stdout, until stdin ends."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(addresses), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.zeros((rows, dim)))

    def batches() -> tf.data.Dataset:
        rng = np.random.default_rng(0)
        drawn = np.stack([rng.choice(rows, ids, replace=False) for _ in range(_BATCHES)])
        return tf.data.Dataset.from_tensor_slices(drawn.astype(np.int64)).repeat().prefetch(4)

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    @tf.function
    def pull(batch):
        return tf.reduce_sum(tf.nn.embedding_lookup(table, next(batch)))

    @tf.function
    def step(batch):
        chosen = next(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, chosen))
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(_RATE * gradient.values, gradient.indices))
        return loss

    def seconds(function, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            coordinator.schedule(function, args=(iterator,))
            coordinator.join()
            taken.append(time.perf_counter() - begun)
        return taken

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps({"pull": seconds(pull, int(line)), "step": seconds(step, int(line))}), flush=True)


def main() -> None:
    """A server for ``--serve ADDRESSES JOB``, else the program."""
    if sys.argv[1] == "--serve":
        cluster = tf.train.ClusterSpec(json.loads(sys.argv[2]))
        tf.distribute.Server(cluster, job_name=sys.argv[3], task_index=0, protocol="grpc").join()
    addresses = {job: [free_address()] for job in ("ps", "worker")}
    command = [sys.executable, __file__, "--serve", json.dumps(addresses)]
    servers = [subprocess.Popen([*command, job], stdin=subprocess.DEVNULL, stdout=sys.stderr) for job in addresses]
    try:
        work(*map(int, sys.argv[1:4]), addresses)
    finally:
        for server in servers:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
