"""Decides how loops are compiled and where the machine code is kept, for both sides.

Imports numba: only what handles rows imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import numba

from ps_protocol.logs import EventLogger

logger = EventLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def _ignore(function: str) -> None:
    """The default: no listener."""


#: Told the name of each function that has been compiled, or loaded. Set in the context that imports kernels.
on_kernel: ContextVar[Callable[[str], None]] = ContextVar("on_kernel", default=_ignore)


def kernel(signature: Any, *, allocates: bool = False, **options: Any) -> Callable[[F], F]:
    """``numba.njit`` without the interpreter's lock, compiled at once for ``signature``, and kept for later processes.

    ``allocates``: it makes arrays. All others count no references to arrays: a helper that is given an array in a loop
    would take two calls and two atomic additions each time, more than the work on a row.

    It is kept where numba finds a folder that can be written: NUMBA_CACHE_DIR, ``__pycache__`` beside the source, else
    the user's cache folder. Without one, or on a full disk, each process compiles for itself. The log reports that, and
    the first compilation of a process, once. Division is numpy's: by zero it does not raise, which would leave a loop
    half done.
    """

    def compile_now(function: F) -> F:
        made = _compiled(function, signature, {"_nrt": allocates, **options})
        on_kernel.get()(function.__name__)
        return made

    return compile_now


def _compiled(function: F, signature: Any, options: dict[str, Any]) -> F:
    make = numba.njit(nogil=True, error_model="numpy", **options)
    dispatcher = make(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        # numba's answer where it can write none of its folders.
        _say_not_kept(str(error))
        dispatcher.compile(signature)
        return dispatcher  # type: ignore[no-any-return]
    try:
        dispatcher.compile(signature)
    except OSError as error:
        # What was compiled could not be written, or what is kept cannot be read.
        _say_not_kept(f"{type(error).__name__}: {error}")
        dispatcher = make(function)
        dispatcher.compile(signature)
    else:
        if dispatcher.stats.cache_misses:
            _say_compiling(dispatcher.stats.cache_path)
    return dispatcher  # type: ignore[no-any-return]


@cache
def _say_compiling(folder: str) -> None:
    logger.warning("compiling", "compiling what tables need: up to half a minute, once; kept in %s", folder)


@cache
def _say_not_kept(reason: str) -> None:
    logger.warning(
        "compiling",
        "what tables need is compiled by each process, up to half a minute: %s; set NUMBA_CACHE_DIR to a folder that "
        "can be written",
        reason,
    )
