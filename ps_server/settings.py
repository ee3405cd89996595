"""One table of settings: fields of a dataclass. Options, environment variables, configuration and flags follow from it.

    @dataclass(frozen=True)
    class Limits:
        max_calls: int = setting(16_384, "Calls in progress.")

``@options(Limits)`` gives a command --max-calls, and with it a variable such as PS_SERVER_MAX_CALLS. ``configured``
makes Limits of the values that the command gets. ``given_settings`` has those that a user set, for another program.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import click
from click.core import ParameterSource

from ps_protocol.cluster.address import is_service_link
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.tables import size_in_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_KEY = "setting"


class Finite(click.FloatRange):
    """A number in a range, neither NaN, which every range of click contains, nor infinite: no timer takes these."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As in click."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class ByteSize(click.ParamType[int, int]):
    """A number of bytes above 0: digits, and perhaps KB, MB, GB or TB, powers of 1,024."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """As in click."""
        try:
            size = size_in_bytes(value)
        except InvalidRequest:
            size = 0
        if size < 1:
            self.fail(f"{value!r} is not a size, such as 512MB or 4GB.", param, ctx)
        return size


_TYPES: Mapping[type, click.ParamType[Any, Any]] = {
    int: click.IntRange(1),
    float: Finite(0, min_open=True),
    str: click.STRING,
    Path: click.Path(file_okay=False, path_type=Path),
}


def setting(default: Any, help: str, type: click.ParamType[Any, Any] | None = None, **attributes: Any) -> Any:
    """A field that an option sets; ``help`` is its text in --help.

    Without ``type``, an int is 1 or more, a float above 0, an enum one of its values, a Path a folder, a bool a flag.
    ``attributes`` are those of ``click.option``, and ``name``, if the option has another name than the field.
    """
    return field(default=default, metadata={_KEY: {"help": help, "type": type, **attributes}})


def settings_of(kind: type) -> dict[str, Field[Any]]:
    """The fields of the dataclass ``kind`` that are settings, by the names of their options."""
    found = [each for each in fields(kind) if _KEY in each.metadata]
    return {each.metadata[_KEY].get("name", each.name): each for each in found}


def options(*kinds: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of all settings of ``kinds`` to a click command, in the order of their fields."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for kind in reversed(kinds):
            hints = get_type_hints(kind)
            for name, each in reversed(settings_of(kind).items()):
                command = _option(name, each, hints[each.name])(command)
        return command

    return decorate


def _option(name: str, source: Field[Any], hint: Any) -> Callable[[Any], Any]:
    attributes = {"default": source.default, "show_default": True, **source.metadata[_KEY]}
    attributes.pop("name", None)
    flag = f"--{name.replace('_', '-')}"
    plain = _without_none(hint)
    if plain is bool:
        attributes["is_flag"] = True
        flag += f"/--no-{flag[2:]}" if source.default else ""
    elif attributes["type"] is None and issubclass(plain, enum.Enum):
        attributes["type"] = click.Choice([each.value for each in plain])
        attributes["default"] = None if source.default is None else source.default.value
    elif attributes["type"] is None:
        attributes["type"] = _TYPES[plain]
    return click.option(flag, name, **attributes)


def configured(kind: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """A ``kind`` with the ``values`` of options, each in the field that has its name or sets it, and ``others``."""
    hints = get_type_hints(kind)
    named = {each.metadata.get(_KEY, {}).get("name", each.name): each.name for each in fields(kind)}
    taken = {field: _read(hints[field], values[name]) for name, field in named.items() if name in values}
    return kind(**{**taken, **others})


def given_settings(context: click.Context, *kinds: type) -> dict[str, Any]:
    """The values of those settings of ``kinds`` that were set: on the command line, in the environment or a file."""
    names = [name for kind in kinds for name in settings_of(kind)]
    return {name: context.params[name] for name in names if was_given(context, name)}


def was_given(context: click.Context, name: str) -> bool:
    """Whether the option ``name`` was set."""
    return context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)


def _read(hint: Any, value: Any) -> Any:
    plain = _without_none(hint)
    return plain(value) if value is not None and isinstance(plain, type) and issubclass(plain, enum.Enum) else value


def _without_none(hint: Any) -> Any:
    return next(each for each in get_args(hint) if each is not type(None)) if isinstance(hint, UnionType) else hint


class PortOption(click.Option):
    """The option of a port. Ignores variables that Kubernetes sets for a Service: PS_COORDINATOR_PORT=tcp://10.0.0.1:7000."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The value of the first variable of the option that does not come from a Service."""
        names = [self.envvar] if isinstance(self.envvar, str) else list(self.envvar or [])
        if ctx.auto_envvar_prefix and self.name:
            names.append(f"{ctx.auto_envvar_prefix}_{self.name.upper()}")
        values = [os.environ.get(name) for name in names]
        return next((value for value in values if value and not is_service_link(value)), None)
