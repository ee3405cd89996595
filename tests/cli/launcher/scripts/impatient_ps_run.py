"""ps-run as it is, but that a process counts as hanging after a few seconds."""

from ps_protocol.launch import life
from ps_server.cli.launcher import main as entry
from ps_server.cli.launcher import supervisor

supervisor.JOINING_SECONDS = 5.0
life.HANGS_SECONDS = 5.0
entry.main()
