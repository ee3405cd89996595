"""Runs one simulated cluster from its first event to the verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ps_protocol.model.spec import StaleRule
from simulation.faults import Faults
from simulation.folders import new_folder
from simulation.judge import Judge
from simulation.observers.subjects import Subjects
from simulation.observers.watching import Observers
from simulation.plan import Plan
from simulation.processes import Processes
from simulation.runtime.disk import Files
from simulation.runtime.kernel import Kernel
from simulation.runtime.network import Network
from simulation.runtime.substitutes import installed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    plan: Plan
    #: Empty when no promise was broken.
    violation: str
    story: str
    events: int
    pushes: int
    replies: int
    virtual_seconds: float
    processor_seconds: float
    #: How often each fault came.
    faults: dict[str, int]


class World:
    """One run. Everything happens in ``run``, in the calling thread."""

    def __init__(self, plan: Plan, *, loud: bool = False) -> None:
        self.plan = plan
        self._kernel = kernel = Kernel(plan.seed)
        kernel.loud = loud
        early = plan.durable and not plan.keeps_acknowledged
        stale = None if plan.stale is None else StaleRule.parse(plan.stale)
        self._judge = Judge(
            kernel,
            plan.shards,
            durable=plan.durable,
            early=early,
            momentum=plan.momentum,
            stale=stale,
            one_mode=plan.loses_no_view,
            raw=plan.wire == "raw",
        )
        self._network = Network(
            kernel, delay_seconds=plan.delay_seconds, calls_lost=plan.calls_lost, calls_late=plan.calls_late
        )
        self._files = Files()
        self._subjects = Subjects(kernel, self._judge, raw=plan.wire == "raw")
        self._counts: dict[str, int] = {}

    def run(self) -> Outcome:
        """Play the plan to its end and judge it."""
        began = time.process_time()
        gradients = torch.is_grad_enabled()
        try:
            with (
                new_folder() as folder,
                installed(self._kernel, self._network, self._files, small_log=self.plan.has_small_log),
                Observers(self._subjects).watching(),
                self._kernel.undisturbed(),
            ):
                self._play(folder)
        finally:
            torch.set_grad_enabled(gradients)
        kernel = self._kernel
        return Outcome(
            self.plan.seed,
            self.plan,
            kernel.violation,
            kernel.story(),
            kernel.count,
            self._judge.pushes_applied,
            self._judge.replies,
            kernel.now,
            time.process_time() - began,
            self._counts,
        )

    def _play(self, folder: Path) -> None:
        kernel, plan = self._kernel, self.plan
        processes = Processes(kernel, self._network, self._files, self._judge, self._subjects, plan, folder)
        faults = Faults(kernel, self._judge, self._subjects, processes)
        self._counts = faults.counts
        processes.begin()
        faults.begin()
        kernel.run_world(plan.ends_at, lambda: processes.done)
        if not kernel.violation and not processes.done:
            kernel.violate(
                f"{processes.to_finish} workers and {processes.to_read} readers have not finished "
                f"{plan.ends_at - plan.quiet_at:.0f} s after the last fault:\n  {processes.doing()}"
            )
        processes.end()
        kernel.settle()
        self._subjects.forget()
        self._network.servers.clear()
