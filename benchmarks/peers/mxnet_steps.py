"""Dense steps of MXNet's ``dist_async``: a program for a Python that has MXNet, not for this one.

``python mxnet_steps.py NBYTES`` starts a scheduler and a server as processes of their own, and answers each line on
stdin, a number of steps, with a line of JSON: seconds of as many steps of one array of NBYTES bytes of float32. A step
pushes the gradient, which the server applies with SGD, and pulls the array; the gradient is filled before it, untimed.
Imports nothing of torch-ps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

_NAME, _RATE = 0, 1e-6


def cluster() -> dict[str, str]:
    """What every process of a job with one server and one worker is told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": "127.0.0.1"}
    threads = {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1"}
    return {**names, **threads, "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}


def work(nbytes: int) -> None:
    """Answer on stdout, until stdin ends."""
    import mxnet

    store = mxnet.kv.create("dist_async")
    store.set_optimizer(mxnet.optimizer.SGD(learning_rate=_RATE))
    values, gradient = mxnet.nd.zeros(nbytes // 4), mxnet.nd.ones(nbytes // 4)
    store.init(_NAME, values)

    def step() -> float:
        gradient[:] = 1.0
        gradient.wait_to_read()
        begun = time.perf_counter()
        store.push(_NAME, gradient)
        store.pull(_NAME, out=values)
        values.wait_to_read()
        return time.perf_counter() - begun

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)


def main() -> None:
    """The program; with a role in DMLC_ROLE a process that importing MXNet keeps until the job ends."""
    if "DMLC_ROLE" in os.environ:
        import mxnet  # noqa: F401 -- serves

        return
    job = cluster()
    others = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **job, "DMLC_ROLE": role},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        for role in ("scheduler", "server")
    ]
    os.environ.update(job, DMLC_ROLE="worker")
    try:
        work(int(sys.argv[1]))
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
