"""Finds the engine that --engine names."""

from __future__ import annotations

import importlib
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_server.coordinator.elasticity.engines.base import WORKERS, WorkerEngine
from ps_server.coordinator.elasticity.engines.kept_request import LAUNCHER, LOST, KeptRequest
from ps_server.coordinator.elasticity.engines.kubernetes import kubernetes_job
from ps_server.coordinator.elasticity.engines.request_file import RequestFile

FORMS = "launcher, launcher:workers, launcher:lost, file:PATH, kubernetes:JOB, or MODULE:CLASS"


def find_engine(text: str, most: int) -> WorkerEngine:
    """The engine of ``text``, one of FORMS, for ``most`` workers at most. Raises ConfigError.

    A class is called without arguments.
    """
    if text == LAUNCHER:
        return KeptRequest()
    if text == f"{LAUNCHER}:{WORKERS}":
        return KeptRequest(frozenset({WORKERS}))
    if text == f"{LAUNCHER}:{LOST}":
        return KeptRequest(frozenset())
    kind, colon, rest = text.partition(":")
    if not colon or not kind or not rest:
        raise ConfigError("--engine is not understood", expected=FORMS, actual=text)
    if kind == "file":
        return RequestFile(Path(rest).absolute())
    if kind == "kubernetes":
        return kubernetes_job(rest, most)
    try:
        made = getattr(importlib.import_module(kind), rest)()
    except Exception as error:
        raise ConfigError(
            f"the engine {text} cannot be made: {error}",
            expected=FORMS,
            actual=text,
            remedy="correct --engine, or put the module where Python finds it (PYTHONPATH)",
        ) from error
    missing = [name for name in ("request", "describe") if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            f"{text} is no engine", expected="the methods request and describe", actual=f"no {', '.join(missing)}"
        )
    engine: WorkerEngine = made
    return engine
