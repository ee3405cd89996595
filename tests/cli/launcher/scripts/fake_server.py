"""Stands for ps-coordinator and ps-server: ready at once, ends at SIGTERM, leaves its pid in PIDS.

With UNREADY a coordinator does not say that it serves. With LIVES a coordinator shows life, until it is stopped.
The one that DIES names writes its name to the file "lives" and is killed at once.
"""

import os
import signal
import sys
import time
from pathlib import Path

name = "coordinator" if "--ready-file" in sys.argv else "shard" + sys.argv[sys.argv.index("--shard") + 1]
signal.signal(signal.SIGTERM, lambda *_: (print("stopped", flush=True), sys.exit(0)))
if shows_life := "PS_LIFE_FD" in os.environ and "LIVES" in os.environ:
    os.write(int(os.environ["PS_LIFE_FD"]), b".")
if "PIDS" in os.environ:
    note = Path(f"{name}.pid")
    note.write_text(str(os.getpid()))
    note.rename(Path(os.environ["PIDS"]) / name)
if os.environ.get("DIES") == name:
    with Path("lives").open("a") as file:
        file.write(name + "\n")
    os.kill(os.getpid(), signal.SIGKILL)
if "--ready-file" in sys.argv and "UNREADY" not in os.environ:
    Path(sys.argv[sys.argv.index("--ready-file") + 1]).write_text("127.0.0.1:9\n")
while True:
    if shows_life:
        os.write(int(os.environ["PS_LIFE_FD"]), b".")
    # Not signal.pause(): Python would see a signal that comes just before it only with the next one.
    time.sleep(0.1)
