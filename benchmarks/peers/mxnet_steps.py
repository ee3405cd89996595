"""Dense steps of MXNet's ``dist_async``: a program for a Python that has MXNet, not for this one.

``python mxnet_steps.py NBYTES`` is the process of a job that DMLC_ROLE in its environment says. A worker answers each
line on stdin, two times of perf_counter, with a line of JSON: seconds of each of the steps that begin between them. A
step pushes a gradient of NBYTES bytes of float32, which the server applies with SGD, and pulls the array.
Imports nothing of torch-ps.
"""

from __future__ import annotations

import json
import os
import sys
import time

_NAME, _RATE = 0, 1e-6


def work(nbytes: int) -> None:
    """Answer on stdout, until stdin ends."""
    import mxnet

    store = mxnet.kv.create("dist_async")
    store.set_optimizer(mxnet.optimizer.SGD(learning_rate=_RATE))
    values, gradient = mxnet.nd.zeros(nbytes // 4), mxnet.nd.ones(nbytes // 4)
    store.init(_NAME, values)

    def step() -> float:
        begun = time.perf_counter()
        store.push(_NAME, gradient)
        store.pull(_NAME, out=values)
        values.wait_to_read()
        return time.perf_counter() - begun

    step()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        first, last = json.loads(line)
        time.sleep(max(0.0, first - time.perf_counter()))
        taken = [step()]
        while time.perf_counter() < last:
            taken.append(step())
        print(json.dumps(taken), flush=True)


def main() -> None:
    """The program. Importing MXNet keeps a scheduler or server until the job ends."""
    if os.environ["DMLC_ROLE"] == "worker":
        work(int(sys.argv[1]))
    else:
        import mxnet  # noqa: F401 -- serves


if __name__ == "__main__":
    main()
