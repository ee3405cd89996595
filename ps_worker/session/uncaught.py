"""Shows errors of torch-ps that a script does not catch: with the script's own frames and the remedy."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

import ps_protocol
from ps_protocol.errors import PsError

VARIABLE = "PS_TRACEBACK"
"""Set to "full": every frame, and the errors that led to this one."""

_OURS = (Path(__file__).parents[1], Path(ps_protocol.__file__).parent)


def install() -> None:
    """Set ``sys.excepthook``, unless the script has set one. Safe to repeat."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def shown(error: PsError, trace: TracebackType | None) -> str:
    """The traceback of ``error`` without torch-ps's own frames and without chained errors."""
    frames = [frame for frame in traceback.extract_tb(trace) if not _is_ours(frame.filename)]
    head = f"Traceback (most recent call last; {VARIABLE}=full shows torch-ps's part, too):\n"
    last = traceback.TracebackException(type(error), error, None).format_exception_only()
    return "".join([head, *traceback.format_list(frames), *last])


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return any(folder in path.parents for folder in _OURS)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, PsError) and os.environ.get(VARIABLE) != "full":
        sys.stderr.write(shown(error, trace))
    else:
        sys.__excepthook__(kind, error, trace)
