"""ps-run as it is, but that a process counts as hanging after a few seconds."""

from ps_protocol import times
from ps_server.cli.launcher import main as entry

times.JOINING_SECONDS = 5.0
times.HANGS_SECONDS = 5.0
entry.main()
