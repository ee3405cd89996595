"""What shards are forked from, as it is, without the imports of a shard; a forked shard tells what it is, and waits.

With THREAD it has a thread after its imports, with SAYS they write that, with FAILS they fail, with STOPS they stop
it. With NO_FORK=N no process is forked from the Nth on. A forked shard ENDS with that exit code, or raises with
ENDS=raises.
"""

import itertools
import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ps_protocol.metrics import common
from ps_server.shard import fork_server
from ps_server.shard import main as shard


def serving():
    if os.environ.get("THREAD"):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if text := os.environ.get("SAYS"):
        print(text, file=sys.stderr)
    if os.environ.get("STOPS"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if os.environ.get("FAILS"):
        raise ImportError("as asked")
    if first := os.environ.get("NO_FORK"):
        fork, numbers = os.fork, itertools.count(1)
        os.fork = lambda: fork() if next(numbers) < int(first) else none_left()
    os.environ["SET_BY_AN_IMPORT"] = "1"
    return serve


def none_left():
    raise BlockingIOError("no process is left")


def opened():
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # of the list itself
            yield str(descriptor.readlink())


async def serve(config, stop):
    told = {
        "shard": config.shard,
        "coordinator": config.coordinator,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "stack": resource.getrlimit(resource.RLIMIT_STACK)[0],
        "descriptors": list(opened()),
        "threads": threading.active_count(),
        "started": common._started,
        "argv": sys.argv[1:],
    }
    print(json.dumps(told))
    if (end := os.environ.get("ENDS")) == "raises":
        raise RuntimeError("as asked")
    if end:
        sys.exit(int(end))
    await stop.wait()
    print("stopped")


if __name__ == "__main__":
    shard.serving = serving
    fork_server.main()
