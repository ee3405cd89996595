"""ps-run as it is, but that a worker counts as hanging a few seconds after its start."""

from ps_server.cli.launcher import hanging
from ps_server.cli.launcher import main as entry

hanging.JOINING_SECONDS = 5.0
entry.main()
