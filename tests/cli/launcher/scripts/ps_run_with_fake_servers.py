"""ps-run as it is, but for its servers, and for what the coordinator tells it: with WANTS that worker 0 is wanted, once
there is a file "hangs"; with WANTS=refused nothing; with WANTS=shard that the shard is lost whose process is the first.
A server that shows no life, or that is stopped, hangs SILENT (5) seconds later: that is longer than what counts where
ps-run itself is kept waiting. The process that is REFUSED cannot be started.
"""

import errno
import functools
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from ps_protocol import times
from ps_protocol.client.worker_requests import LostServer, Wanted
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.cluster.view import Role
from ps_protocol.errors import PermissionDenied
from ps_server.cli.launcher import machines, runner
from ps_server.cli.launcher import main as entry

fake = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
entry.Programs = functools.partial(entry.Programs, servers=(fake, fake))
wants = os.environ.get("WANTS")
times.HANGS_SECONDS = float(os.environ.get("SILENT", "5"))
if refused := os.environ.get("REFUSED"):
    child = machines.Child

    def started(process, *arguments, **options):
        if str(process) == refused:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return child(process, *arguments, **options)

    machines.Child = started


def LOST(pid):
    """The last life of the shard, which is not there any more; a standby that is none of this job; the shard."""
    return (Role.SHARD, pid + 1), (Role.STANDBY, pid), (Role.SHARD, pid)


class Requests:
    """Stands for the real one, which would call the coordinator."""

    def __init__(self, address, security):
        self._taken = wants is None

    def take(self):
        """What is requested once, and what the file "order" has: the arguments of an order, as JSON."""
        order = None
        with suppress(FileNotFoundError):
            values = json.loads(Path("order").read_text())
            order = ScaleOrder(**{name: frozenset(v) if isinstance(v, list) else v for name, v in values.items()})
        if self._taken or not Path("hangs").exists():
            return Wanted(order=order)
        self._taken = True
        Path("taken").touch()
        if wants == "refused":
            return Wanted(order=order, error=PermissionDenied("GetWorkerRequest is not for this role"))
        if wants == "shard":
            pid = int((Path(os.environ["PIDS"]) / "shard0").read_text())
            lost = tuple(LostServer(role, 0, "", number, "its lease ended") for role, number in LOST(pid))
            return Wanted(lost=lost, order=order)
        return Wanted((0,), order=order)

    def ask_now(self):
        pass

    def close(self):
        pass


runner.WorkerRequests = Requests
# What is requested is seen at once, not a second later.
timeout = runner.Runner._timeout
runner.Runner._timeout = lambda self: min(0.05, timeout(self))
if wants:
    times.JOINING_SECONDS = 0.0
entry.main()
