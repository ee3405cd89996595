"""The log of a training script, where its environment asks for one: PS_LOG_FORMAT, PS_LOG_LEVEL."""

from __future__ import annotations

from collections.abc import Mapping

from ps_protocol.errors import ConfigError
from ps_protocol.logs import LEVELS, LogFormat, configure_logging, describe_process

LOGGERS = ("ps_worker", "ps_protocol")


def install(environ: Mapping[str, str]) -> None:
    """Write the records of torch-ps to stderr in the form of ``PS_LOG_FORMAT``, from ``PS_LOG_LEVEL`` on.

    Does nothing if neither is set: the script's own logging then gets the records. Raises ConfigError.
    """
    form, level = environ.get("PS_LOG_FORMAT") or "", environ.get("PS_LOG_LEVEL") or ""
    if not form and not level:
        return
    forms = [each.value for each in LogFormat]
    form = _choice("PS_LOG_FORMAT", form or LogFormat.TEXT.value, forms)
    configure_logging(_choice("PS_LOG_LEVEL", level or "warning", LEVELS), LogFormat(form), LOGGERS)
    describe_process(job=environ.get("PS_JOB"))


def _choice(name: str, value: str, known: tuple[str, ...] | list[str]) -> str:
    if value.lower() not in known:
        raise ConfigError(
            f"{name} is not one of those known",
            expected=", ".join(known),
            actual=repr(value),
            remedy=f"correct {name} or leave it out",
        )
    return value.lower()
