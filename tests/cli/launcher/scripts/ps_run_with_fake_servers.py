"""ps-run as it is, but for its servers."""

import functools
import sys
from pathlib import Path

from ps_server.cli.launcher import main as entry

fake = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
entry.Programs = functools.partial(entry.Programs, servers=(fake, fake))
entry.main()
