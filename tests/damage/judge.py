"""Decides what is to be held of a reader that met a damaged directory: right, refused, or wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import PsError
from tests.damage.hurt import Damage

RIGHT, REFUSED = "right", "refused"
WRONG, UNNAMED, CRASHED = "WRONG STATE", "REFUSED WITHOUT NAMING THE FILE", "NO TYPED ERROR"
BAD = (WRONG, UNNAMED, CRASHED)


@dataclass(frozen=True)
class Subject:
    """One kind of directory."""

    name: str
    #: Writes one into an empty folder, as a killed process leaves it, or one that was stopped.
    make: Callable[[Path], None]
    #: What it holds, comparable. Raises PsError for a refusal.
    read: Callable[[Path], object]


@dataclass(frozen=True)
class Verdict:
    """What came of one damage."""

    outcome: str
    detail: str = ""


def judge(subject: Subject, whole: Path, expected: object, work: Path, damage: Damage) -> Verdict:
    """Hurt a copy of ``whole`` at ``work``, and read it twice: the first start may have changed something."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work)
    damage.apply(work)
    try:
        for _ in range(2):
            if subject.read(work) != expected:
                return Verdict(WRONG)
    except PsError as error:
        # A missing file may be noticed at another of its folder.
        named = str(work / damage.path) in str(error) or str((work / damage.path).parent) in str(error)
        return Verdict(REFUSED if named else UNNAMED, str(error))
    except Exception as error:  # noqa: BLE001 -- any other is what is looked for
        return Verdict(CRASHED, f"{type(error).__name__}: {error}")
    return Verdict(RIGHT)
