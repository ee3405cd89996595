"""Stands for ps-coordinator and ps-server: ready at once, ends at SIGTERM, leaves its pid in PIDS.

The one that DIES names writes its name to the file "lives" and is killed at once. With WANTS the coordinator asks its
engine for worker 0 once there is a file "hangs".
"""

import os
import signal
import sys
import time
from pathlib import Path

name = "coordinator" if "--ready-file" in sys.argv else "shard" + sys.argv[sys.argv.index("--shard") + 1]
signal.signal(signal.SIGTERM, lambda *_: (print("stopped", flush=True), sys.exit(0)))
if "PIDS" in os.environ:
    (Path(os.environ["PIDS"]) / name).write_text(str(os.getpid()))
if os.environ.get("DIES") == name:
    with Path("lives").open("a") as file:
        file.write(name + "\n")
    os.kill(os.getpid(), signal.SIGKILL)
if "--ready-file" in sys.argv:
    path = Path(sys.argv[sys.argv.index("--ready-file") + 1])
    path.with_suffix(".new").write_text("127.0.0.1:9\n")
    path.with_suffix(".new").rename(path)
if name == "coordinator" and "WANTS" in os.environ:
    while not Path("hangs").exists():
        time.sleep(0.02)
    engine = sys.argv[sys.argv.index("--engine") + 1]
    request = Path(engine.removeprefix("file:"))
    request.write_text(os.environ["WANTS"])
    while request.exists():
        time.sleep(0.02)
    Path("taken").touch()
while True:
    signal.pause()
