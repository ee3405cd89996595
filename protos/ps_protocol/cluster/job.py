"""The name of a job. Its coordinator sends it to all members, for metrics and logs; certificates have it."""

from __future__ import annotations

import re

from ps_protocol.errors import ConfigError

DEFAULT_JOB = "job"
"""The name of a job that was given none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def job_name(setting: str, text: str) -> str:
    """``text``, where it can name a job. Raises ConfigError, which names ``setting``."""
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"{setting} is no name of a job",
            expected="1 to 100 letters of ASCII, digits, '-', '_' and '.', of which the first is a letter or a digit",
            actual=repr(text),
            remedy=f"correct {setting} or leave it out",
        )
    return text
