"""Converts a dataclass to the message that has its field names, and back. Hot messages are converted by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from ps_protocol.errors import InvalidRequest
from ps_protocol.text import printable

D = TypeVar("D")
E = TypeVar("E", bound=Enum)
M = TypeVar("M", bound=Message)

Convert = Callable[[Any], Any]

GIVEN = object()
"""Marks a field of the dataclass that no single field of the message has: the caller gives it."""


class Special(NamedTuple):
    """How one field is converted that has another form in the message."""

    to_pb: Convert
    from_pb: Convert
    #: Of the field in the message; empty: as in the dataclass.
    name: str = ""


class Unset(NamedTuple):
    """The member of an enum that its unspecified number means. Otherwise that number is refused."""

    member: Enum


class EnumNumbers(Generic[E]):
    """The numbers that messages have for an enum, whose members have the same names there behind a prefix."""

    def __init__(self, kind: type[E], descriptor: Any, unset: E | None = None) -> None:
        prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
        self.numbers: Mapping[E, Any] = {each: descriptor.values_by_name[prefix + each.name].number for each in kind}
        self.members: dict[int, E] = {number: each for each, number in self.numbers.items()}
        if unset is not None:
            self.members[0] = unset

    def member(self, number: int, what: str) -> E:
        """Raises InvalidRequest, naming ``what``, for a number that this version does not know."""
        return self.members.get(number) or self.refuse(number, what)

    def refuse(self, number: int, what: str) -> NoReturn:
        """Raises InvalidRequest for ``number``."""
        raise InvalidRequest(
            f"{what} {number} is not known here",
            expected=", ".join(f"{known} ({each.name.lower()})" for each, known in self.numbers.items()),
            actual=str(number),
            remedy="use the same torch-ps on both sides",
        )


class Converter(Generic[D, M]):
    """Converts dataclasses ``kind`` to messages of class ``message`` and back. Any thread may use it.

    The types of the fields say how: numbers and bytes stay as they are, text is read through ``text``, enums go by
    name, an optional field by its presence, tuples, sets and mappings element by element. ``special``, by field: the
    Converter of a nested dataclass, Special, Unset or GIVEN. Raises TypeError for a field that the message lacks.
    """

    def __init__(self, kind: type[D], message: type[M], text: Convert | None = None, **special: object) -> None:
        self.kind, self.message = kind, message
        hints = get_type_hints(kind)
        if odd := special.keys() - hints.keys():
            raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(odd))}")
        #: What the expressions below name.
        known: dict[str, Any] = {"kind": kind, "message_class": message}
        to_pb, from_pb = [], []
        for name, hint in hints.items():
            how = special.get(name)
            if how is GIVEN:
                continue
            wire = how.name if isinstance(how, Special) and how.name else name
            if (field := message.DESCRIPTOR.fields_by_name.get(wire)) is None:
                raise TypeError(f"{message.DESCRIPTOR.name} has no field {wire}")
            optional = NoneType in get_args(hint) and field.has_presence
            inner = get_args(hint)[0] if NoneType in get_args(hint) else hint
            if isinstance(inner, type) and issubclass(inner, Enum) and not isinstance(how, Special):
                numbers = EnumNumbers(inner, field.enum_type, how.member if isinstance(how, Unset) else None)
                known[f"numbers_{name}"], known[f"members_{name}"] = numbers.numbers, numbers.members
                known[f"unknown_{name}"] = _unknown(numbers, wire)
                to_pb.append(f"{wire}=numbers_{name}[value.{name}]")
                from_pb.append(f"{name}=members_{name}.get(message.{wire}) or unknown_{name}(message)")
                continue
            there, back = (how.to_pb, how.from_pb) if isinstance(how, Special) else _by_type(inner, how, text)
            known[f"to_{name}"], known[f"from_{name}"] = there, back
            sent = f"to_{name}(value.{name})" if there else f"value.{name}"
            read = f"from_{name}(message.{wire})" if back else f"message.{wire}"
            to_pb.append(f"{wire}={sent}" + f" if value.{name} is not None else None" * optional)
            from_pb.append(f"{name}={read}" + f" if message.HasField('{wire}') else None" * optional)
        # Written out as dataclasses writes __init__: as fast as by hand, also for the many variables of a large model.
        self._to_pb = eval(f"lambda value, more: message_class({', '.join(to_pb)}, **more)", known)
        self._from_pb = eval(f"lambda message, given: kind({', '.join(from_pb)}, **given)", known)

    def to_pb(self, value: D, **more: Any) -> M:
        """The message of ``value``. ``more``: fields that the dataclass does not have.

        Raises InvalidRequest for a number or text that its field cannot hold.
        """
        try:
            message: M = self._to_pb(value, more)
        except ValueError as error:
            raise _not_held(self.message, value, error) from error
        return message

    def from_pb(self, message: M, **given: Any) -> D:
        """The dataclass of ``message``. ``given``: the fields that are GIVEN.

        Raises InvalidRequest for the number of an enum that this version does not know.
        """
        value: D = self._from_pb(message, given)
        return value

    def all_to_pb(self, values: Iterable[D]) -> list[M]:
        """The message of each of ``values``."""
        return list(map(self.to_pb, values))

    def all_from_pb(self, messages: Iterable[M]) -> tuple[D, ...]:
        """The dataclass of each of ``messages``. Raises as ``from_pb``."""
        return tuple(map(self.from_pb, messages))


def message_of(kind: type[M], **values: Any) -> M:
    """A ``kind`` with ``values``. Raises InvalidRequest for a number or text that its field cannot hold."""
    try:
        return kind(**values)
    except ValueError as error:
        raise _not_held(kind, values, error) from error


def _not_held(kind: type[Message], value: Any, error: ValueError) -> InvalidRequest:
    return InvalidRequest(
        f"{kind.DESCRIPTOR.name} cannot be sent: {error}",
        expected="numbers in the range of their fields, and Unicode text",
        actual=repr(value)[:200],
    )


def _by_type(hint: Any, how: object, text: Convert | None) -> tuple[Convert | None, Convert | None]:
    """The conversions of a value to and from its form in a message; None: it stays as it is."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(how, Converter):
        return (how.all_to_pb, how.all_from_pb) if origin in (tuple, Sequence) else (how.to_pb, how.from_pb)
    if hint is str:
        return None, text
    if hint in (int, float, bool, bytes):
        return None, None
    if origin in (tuple, Sequence) and arguments[0] in (int, float):
        return None, tuple
    if origin is frozenset and arguments[0] is int:
        return sorted, frozenset
    if origin is Mapping and text is not None and arguments == (str, str):
        return dict, lambda found: {text(key): text(value) for key, value in found.items()}
    if origin is Mapping and text is not None and arguments[0] is str:
        return dict, lambda found: {text(key): value for key, value in found.items()}
    if origin is Mapping:
        return dict, dict
    raise TypeError(f"a field of type {hint} has no conversion of its own")


def _unknown(numbers: EnumNumbers[Any], wire: str) -> Callable[[Any], NoReturn]:
    def refuse(message: Any) -> NoReturn:
        name = f" '{printable(message.name)}'" if hasattr(message, "name") else ""
        numbers.refuse(getattr(message, wire), f"{wire} of {message.DESCRIPTOR.name}{name}")

    return refuse
