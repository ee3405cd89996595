"""Which variables and files of ps-run go to the hosts of a job. Pure but for the files that it is told to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.security.settings import VARIABLES

THREADS_VARIABLE = "OMP_NUM_THREADS"

_FILES = frozenset(VARIABLES[name] for name in ("tls_cert", "tls_key", "tls_ca", "token_file"))


def passed(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """The variables for the processes on all hosts: PS_…, except those that are options of ps-run, and OMP_NUM_THREADS.

    ``asked``: NAME, which is set in ``environ``, or NAME=VALUE. Raises ConfigError.
    """
    sent = {
        name: value
        for name, value in environ.items()
        if name == THREADS_VARIABLE or (name.startswith("PS_") and not name.startswith("PS_RUN_"))
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environ):
            raise ConfigError(
                f"--env {text}: no such variable",
                expected="the name of a variable that is set, or NAME=VALUE",
                remedy="set it, or leave --env out",
            )
        sent[name] = value if equals else environ[name]
    return sent


def contents(secured: Mapping[str, str]) -> tuple[dict[str, str], dict[str, bytes]]:
    """``secured``, the variables of a process's own certificates and token: those that name no file, and the contents
    of the files by the variable that names each.
    """
    files = {name: Path(value).read_bytes() for name, value in secured.items() if name in _FILES}
    return {name: value for name, value in secured.items() if name not in _FILES}, files
