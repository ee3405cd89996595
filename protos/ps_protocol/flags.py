"""Renders settings as flags, for a process that starts another one."""

from __future__ import annotations

import enum
from collections.abc import Mapping


def flags(settings: Mapping[str, object]) -> list[str]:
    """``settings`` as the command line of a program that has an option for each: ``max_calls=7`` is --max-calls 7.

    True is a flag without a value. None and False give nothing: the program has its default. A list or tuple repeats
    its flag.
    """
    arguments: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is True:
                arguments.append(flag)
            elif each is not None and each is not False:
                arguments += [flag, str(each.value if isinstance(each, enum.Enum) else each)]
    return arguments
