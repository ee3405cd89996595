"""Replicas as processes forked from one that has imported torch, which run a function of a test module."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ps_protocol.cluster.replicas import STORE_VARIABLE
from tests.recovery.zygote import PYTHON, Forked, shared

ROOT = Path(__file__).parents[3]

#: Of a process: finds the function, calls it, leaves what it returned, and its error, as JSON.
CODE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.worker.strategies.replicas import become
become(*sys.argv[1:])
"""

RUN_SECONDS = 90.0


def become(name: str, argument: str, written: str) -> None:
    """In the process of a replica."""
    module, _, function = name.rpartition(".")
    try:
        answer = {"value": getattr(importlib.import_module(module), function)(json.loads(argument))}
    except Exception as error:  # noqa: BLE001 -- told to the test
        answer = {"error": type(error).__name__, "message": str(error)}
    part = Path(f"{written}.part")
    part.write_text(json.dumps(answer))
    part.rename(written)


class Replicas:
    """The processes of one job; ``environment`` is added to that of each."""

    def __init__(
        self, folder: Path, count: int, work: Callable[[Any], Any], argument: Any = None, **environment: str
    ) -> None:
        self._written = [folder / f"replica-{rank}.json" for rank in range(count)]
        name = f"{work.__module__}.{work.__name__}"
        self.processes: list[Forked] = []
        for rank, file in enumerate(self._written):
            its = {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(count),
                STORE_VARIABLE: str(folder / "store"),
                "GLOO_SOCKET_IFNAME": "lo",
                **environment,
            }
            with Path(os.devnull).open("r+") as nothing:
                files = [nothing.fileno(), sys.__stdout__.fileno(), sys.__stderr__.fileno()]
                arguments = ["-c", CODE, name, json.dumps(argument), str(file)]
                self.processes.append(shared().start(PYTHON, arguments, its, files))

    def answers(self) -> list[dict[str, Any]]:
        """What each returned, or its error, when all have ended."""
        for process in self.processes:
            process.wait(RUN_SECONDS)
        return [json.loads(file.read_text()) if file.exists() else {} for file in self._written]

    def values(self) -> list[Any]:
        answers = self.answers()
        assert all("value" in each for each in answers), answers
        return [each["value"] for each in answers]

    def close(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)
