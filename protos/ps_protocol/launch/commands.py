"""The command line of a server, whoever starts it."""

from __future__ import annotations

import sys

# -P: the folder that a program is called in has the modules of the user, not those of the servers.
COORDINATOR = (sys.executable, "-P", "-m", "ps_server.coordinator.main")
SHARD = (sys.executable, "-P", "-m", "ps_server.shard.main")
