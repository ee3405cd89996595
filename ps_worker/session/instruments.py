"""Owns the trace of a worker's steps and its TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ps_protocol.cluster.view import Member, Role
from ps_protocol.tracing.settings import make_tracer
from ps_protocol.tracing.tracer import Tracer
from ps_worker.session.tensorboard import VARIABLE, ReportedScalars, Values, open_writer


class Instruments:
    """Made by the session. Both are off until ``open``, and stay off unless the environment enables them."""

    def __init__(self) -> None:
        #: Records the steps of this worker; None: tracing is off.
        self.tracer: Tracer | None = None
        #: The parameter version of the model that changed last: the x-axis of reported values.
        self.version = 0
        self._scalars: ReportedScalars | None = None

    def open(self, environ: Mapping[str, str], member: Member) -> None:
        """Open the files that ``environ`` names. Raises ConfigError."""
        if member.role is Role.WORKER:
            self.tracer = make_tracer(environ, str(member))
        if folder := environ.get(VARIABLE):
            self._scalars = ReportedScalars(open_writer(Path(folder) / f"{member.role.value}-{member.index}"))

    def report(self, values: Values) -> None:
        """Record ``values`` that the script reports."""
        if self._scalars is not None:
            self._scalars.add(values, self.version)

    def close(self) -> None:
        """Write what is buffered, and close the files."""
        if self.tracer is not None:
            self.tracer.close()
        if self._scalars is not None:
            self._scalars.close()
