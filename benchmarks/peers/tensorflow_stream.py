"""The example of a stream on TensorFlow parameter servers: a program for another Python, which has TensorFlow.

``python tensorflow_stream.py SETTINGS``, a JSON object with the flags of ``examples/streaming_model.py``, starts one
parameter server and as many workers as there are, each a process of its own, trains as the example does, and leaves the
same scores in ``out``; it prints a line of JSON for each window, the seconds of its training. Steps are ``tf.function``
s, scheduled by a ``ClusterCoordinator``; a batch is a file, which is written before its window is timed. A table
is one variable, with a row for each id that there will be; Adagrad keeps a sum for each number, not for each row,
as TensorFlow's own operation does. Imports nothing of torch-ps but the events, which are NumPy.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from streaming.events import NONE, NUMBERS, Stream

_WIDTH = 64
_VECTORS = 4
_BETAS, _EPS = (0.9, 0.999), 1e-8


def free_address() -> str:
    """An address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def end_with_parent() -> None:
    """Called in a new process: the system kills it when its parent is no more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Ranker:
    """``streaming.ranker.Ranker``; its variables are on the server. To be made in the scope of the strategy."""

    def __init__(self, users: int, items: int, topics: int, dim: int, initial: float) -> None:
        def variable(*shape, std=0.0):
            return tf.Variable(tf.random.normal(shape, stddev=std) if std else tf.zeros(shape))

        def linear(inputs, outputs):
            # As torch draws the weights of nn.Linear.
            bound = inputs**-0.5
            return [tf.Variable(tf.random.uniform(shape, -bound, bound)) for shape in ((inputs, outputs), (1, outputs))]

        self.dim = dim
        self.tables = [variable(users, dim, std=0.01), variable(items, dim, std=0.01)]
        self.sums = [tf.Variable(tf.fill((size, dim), np.float32(initial))) for size in (users, items)]
        pairs = _VECTORS * (_VECTORS - 1) // 2
        layers = [
            linear(dim, dim),
            linear(NUMBERS, _WIDTH),
            linear(_WIDTH, dim),
            linear(_VECTORS * dim + pairs, _WIDTH),
            linear(_WIDTH, _WIDTH),
            linear(_WIDTH, 1),
        ]
        self.dense = [variable(topics, dim, std=0.1), *(each for layer in layers for each in layer)]
        self.moments = [[tf.Variable(tf.zeros(each.shape)) for each in self.dense] for _ in range(2)]
        self.steps = tf.Variable(0.0)
        lower = [(row, column) for row in range(_VECTORS) for column in range(row)]
        self.pairs = [tf.constant(which) for which in zip(*lower, strict=True)]

    def logits(self, users, items, here, topics, numbers, dense):
        """[n]. ``users``, ``items``: the vectors of a batch; ``here``: where a history has an item."""
        of_topics, query, query_bias, *layers = dense
        items = items + tf.gather(of_topics, topics)
        item, last = items[:, 0], items[:, 1:]
        fits = tf.reduce_sum(last * (item @ query + query_bias)[:, None], axis=2) / self.dim**0.5
        fits = tf.where(here, fits, tf.constant(-1e9))
        weights = tf.nn.softmax(tf.pad(fits, [[0, 0], [1, 0]]), axis=1)[:, 1:]
        interest = tf.reduce_sum(weights[:, :, None] * last, axis=1)
        (w0, b0, w1, b1), top = layers[:4], layers[4:]
        bottom = tf.nn.relu(numbers @ w0 + b0) @ w1 + b1
        vectors = tf.stack([bottom, users, item, interest], axis=1)
        first, second = (tf.gather(vectors, which, axis=1) for which in self.pairs)
        dots = tf.reduce_sum(first * second, axis=2)
        hidden = tf.concat([tf.reshape(vectors, [-1, _VECTORS * self.dim]), dots], axis=1)
        for number in range(0, len(top), 2):
            hidden = hidden @ top[number] + top[number + 1]
            if number < len(top) - 2:
                hidden = tf.nn.relu(hidden)
        return hidden[:, 0]


def write(stream: Stream, window: int, place: int, batch: int, path: Path) -> None:
    """A batch as bytes: users, items, numbers, labels."""
    events = stream.draw(window, place * batch, batch)
    parts = (events.users, events.items, events.numbers, events.labels)
    path.write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def work(options: dict, addresses: dict[str, list[str]]) -> None:
    """Train and rank all windows."""
    stream = Stream(options["seed"], options["events"], items=options["items"])
    batch, windows = options["batch"], options["windows"]
    updates = -(-stream.events // batch)
    out = Path(options["out"])
    (out / "scores").mkdir(parents=True)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(addresses), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    tf.random.set_seed(options["seed"])
    with strategy.scope():
        sizes = (stream.users_until(windows), stream.items_until(windows))
        model = Ranker(*sizes, stream.topics, options["dim"], options["initial"])
    columns = 1 + stream.history
    event_bytes = 8 * (1 + columns) + 4 * (NUMBERS + 1)

    def read(path):
        data = tf.io.read_file(path)
        count = tf.strings.length(data) // event_bytes
        sizes = [8 * count, 8 * columns * count, 4 * NUMBERS * count, 4 * count]
        parts, begin = [], 0
        for size, dtype in zip(sizes, (tf.int64, tf.int64, tf.float32, tf.float32), strict=True):
            parts.append(tf.io.decode_raw(tf.strings.substr(data, begin, size), dtype))
            begin = begin + size
        users, items, numbers, labels = parts
        return users, tf.reshape(items, [-1, columns]), tf.reshape(numbers, [-1, NUMBERS]), labels

    def forward(path):
        users, items, numbers, labels = read(path)
        (user_ids, user_places), (item_ids, item_places) = tf.unique(users), tf.unique(tf.reshape(items, [-1]))
        rows = [tf.gather(table, ids) for table, ids in zip(model.tables, (user_ids, item_ids), strict=True)]
        dense = [tf.convert_to_tensor(each) for each in model.dense]

        def logits():
            of_items = tf.reshape(tf.gather(rows[1], item_places), [-1, columns, model.dim])
            topics, here = tf.math.floormod(items - 1, stream.topics), tf.not_equal(items[:, 1:], NONE)
            return model.logits(tf.gather(rows[0], user_places), of_items, here, topics, numbers, dense)

        return logits, rows, dense, (user_ids, item_ids), labels

    @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
    def step(path):
        logits, rows, dense, ids, labels = forward(path)
        with tf.GradientTape() as tape:
            tape.watch([rows, dense])
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits()))
        of_rows, of_dense = tape.gradient(loss, [rows, dense])
        for table, sums, gradient, own in zip(model.tables, model.sums, of_rows, ids, strict=True):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle, accum=sums.handle, lr=options["row_lr"], epsilon=1e-10, grad=gradient, indices=own
            )
        number = model.steps.assign_add(1.0, read_value=True)
        for variable, mean, square, gradient in zip(model.dense, *model.moments, of_dense, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=mean.handle,
                v=square.handle,
                beta1_power=_BETAS[0] ** number,
                beta2_power=_BETAS[1] ** number,
                lr=options["lr"],
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                epsilon=_EPS,
                grad=tf.convert_to_tensor(gradient),
            )
        return loss

    @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
    def score(path):
        logits, *_, labels = forward(path)
        return tf.stack([labels, logits()])

    def files(window, every=1):
        folder = out / "data"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        paths = {place: folder / f"{window}-{place}" for place in range(0, updates, every)}
        for place, path in paths.items():
            write(stream, window, place, batch, path)
        return {place: tf.constant(str(path)) for place, path in paths.items()}

    for window in range(windows):
        paths = files(window)
        began = time.perf_counter()
        for path in paths.values():
            coordinator.schedule(step, args=(path,))
        coordinator.join()
        seconds = time.perf_counter() - began
        paths = files(window + 1, options["rank_every"])
        scores = {place: coordinator.schedule(score, args=(path,)) for place, path in paths.items()}
        coordinator.join()
        for place, value in scores.items():
            np.save(out / "scores" / f"{window + 1}-{(window + 1) * updates + place}.npy", value.fetch())
        print(json.dumps({"window": window, "events": stream.events, "seconds": seconds, "again": 0}), flush=True)
    shutil.rmtree(out / "data")


def main() -> None:
    """A server for ``--serve ADDRESSES JOB INDEX``, else the program."""
    if sys.argv[1] == "--serve":
        cluster = tf.train.ClusterSpec(json.loads(sys.argv[2]))
        tf.distribute.Server(cluster, job_name=sys.argv[3], task_index=int(sys.argv[4]), protocol="grpc").join()
    options = json.loads(sys.argv[1])
    addresses = {"ps": [free_address()], "worker": [free_address() for _ in range(options["workers"])]}
    command = [sys.executable, __file__, "--serve", json.dumps(addresses)]
    servers = [
        subprocess.Popen(
            [*command, job, str(index)], stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=end_with_parent
        )
        for job, places in addresses.items()
        for index in range(len(places))
    ]
    try:
        work(options, addresses)
    finally:
        for server in servers:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
