"""ps-run as it is, but for its servers."""

import functools
import os
import sys
from pathlib import Path

from ps_server.cli.launcher import main as entry
from ps_server.cli.launcher import supervisor

fake = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
entry.Programs = functools.partial(entry.Programs, servers=(fake, fake))
if "WANTS" in os.environ:
    supervisor.JOINING_SECONDS = 0.0
entry.main()
