"""ps-run as it is, but for its servers, and for what the coordinator asks it for: with WANTS for worker 0, once there
is a file "hangs", or with WANTS=refused for nobody.
"""

import functools
import os
import sys
from pathlib import Path

from ps_protocol.errors import PermissionDenied
from ps_server.cli.launcher import hanging, runner
from ps_server.cli.launcher import main as entry

fake = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
entry.Programs = functools.partial(entry.Programs, servers=(fake, fake))
wants = os.environ.get("WANTS")


class Requests:
    """Stands for the real one, which would call the coordinator."""

    def __init__(self, address, security):
        self._taken = wants is None

    def take(self):
        if self._taken or not Path("hangs").exists():
            return ()
        self._taken = True
        Path("taken").touch()
        if wants == "refused":
            raise PermissionDenied("GetWorkerRequest is not for this role")
        return (0,)

    def close(self):
        pass


runner.WorkerRequests = Requests
if wants:
    hanging.JOINING_SECONDS = 0.0
entry.main()
