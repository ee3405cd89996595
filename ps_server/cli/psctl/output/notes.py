"""What psctl says beside its output: lines on stderr, or records of the log where the log is JSON."""

from __future__ import annotations

import logging

from ps_protocol.logs import EventLogger, LogFormat, configure_logging, describe_process, logs_json
from ps_server.cli.psctl.output.facts import say

logger = EventLogger(__name__)


def log_as(level: str | None, form: LogFormat, job: str | None) -> None:
    """Write the log of this command as told; records from warnings on, unless told."""
    if level is None and form is LogFormat.TEXT:
        return  # a warning is printed as it is, without time and name
    configure_logging(level or "warning", form)
    # What a command says belongs to its output, whatever the level.
    logging.getLogger(__name__).setLevel(logging.INFO)
    describe_process(role="psctl", job=job)


def note(text: str, level: int = logging.INFO) -> None:
    """Say ``text`` on stderr; ``level`` is that of the record where the log is JSON."""
    if logs_json():
        logger.log(level, "psctl.note", "%s", text)
    else:
        say(text, err=True)
