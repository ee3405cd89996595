"""Runs scenarios in processes forked from one that has imported Lightning, which takes several seconds."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.recovery.zygote import shared
from tests.support.interpreters import Interpreter


class LightningProcesses:
    """One per test module. Each scenario runs in as many processes as it has environments, one after the import."""

    def __init__(self, lightning: Path | None = None) -> None:
        """``lightning``: a folder with another version than the installed one."""
        self._process = _started(lightning) if lightning else _forked()

    def run(self, folder: Path, *calls: tuple[str, Mapping[str, str], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Results of scenarios that run at the same time: their names, environments and arguments, in order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder.mkdir(exist_ok=True)
        self._process.stdin.write(json.dumps([str(folder), calls], default=str) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        for number in range(len(calls)):
            failure = folder / f"{number}.txt"
            assert not failure.exists(), failure.read_text()
        return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(len(calls))]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _forked() -> Interpreter:
    shared().load("ps_worker.lightning", "tests.lightning.modules", "tests.lightning.calls")
    return Interpreter("-m", "tests.lightning.processes", PS_LOG_LEVEL="warning")


def _started(lightning: Path) -> subprocess.Popen[str]:
    """An interpreter of its own, which has not imported the installed Lightning."""
    paths = [str(lightning)]
    paths += [path for path in (os.environ.get("PYTHONPATH"),) if path]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lightning.processes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PS_LOG_LEVEL": "warning", "PYTHONPATH": os.pathsep.join(paths)},
    )


def main() -> None:
    from ps_protocol import times
    from ps_worker.connection import leave
    from tests.lightning import calls as single
    from tests.lightning import modules

    scenarios = {name: getattr(modules, name) for name in ("fit", "again", "averages", "manual", "loop")}
    scenarios |= {name: getattr(single, name) for name in ("fabric_calls", "trainer_calls", "as_evaluator")}
    # How a worker has ended is asserted: it is told however busy the machine is.
    times.BRIEF_CALL_SECONDS = 60.0
    # What nobody collects, nobody copies.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        folder, calls = json.loads(line)
        children = []
        for number, (scenario, environment, arguments) in enumerate(calls):
            if (child := os.fork()) == 0:
                os.environ.update(environment)
                os.dup2(2, 1)
                arguments["folder"] = Path(arguments["folder"])
                code = _run(functools.partial(scenarios[scenario], **arguments), Path(folder), number)
                if scenario == "loop":
                    # As at the end of a program: what is registered for the exit runs.
                    atexit._run_exitfuncs()
                else:
                    leave()
                os._exit(code)
            children.append(child)
        for number, child in enumerate(children):
            if os.waitpid(child, 0)[1]:
                (Path(folder) / f"{number}.txt").open("a").write("it did not end with code 0")
        print("done", flush=True)


def _run(scenario: Any, folder: Path, number: int) -> int:
    import lightning

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = scenario()
        result["warnings"] = sorted({str(each.message) for each in caught})
        result["lightning"] = lightning.__version__
        torch.save(result, folder / f"{number}.pt")
    except BaseException:  # noqa: BLE001 -- the process ends with it
        (folder / f"{number}.txt").write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    main()
