"""Dataclasses as JSON's types and back. They are written as their fields are, and read by the types of their fields,
which are checked.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_SCALARS = frozenset({bool, int, float, str, type(None)})


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """The fields of ``record`` by name, as they are; a dataclass among them stays one.

    ``dataclasses.asdict`` copies all that is in them.
    """
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def to_plain(value: Any) -> Any:
    """``value`` as JSON's types: a dataclass by the names of its fields, an enum as its value, bytes as hexadecimal
    digits, a set rising.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if (names := getattr(kind, "__dataclass_fields__", None)) is not None:
        values = [(name, getattr(value, name)) for name in names]
        return {name: each if type(each) in _SCALARS else to_plain(each) for name, each in values}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    return value.hex() if isinstance(value, bytes) else sorted(map(to_plain, value))


def from_plain(kind: type[T], plain: Any) -> T:
    """The ``kind`` that ``to_plain`` wrote as ``plain``. A field with a default may be missing.

    Raises TypeError, ValueError, LookupError for anything else, such as an unknown field or a value of another type.
    """
    hint: Any = kind
    found: T = _reader(hint)(plain)
    return found


def fields_from(kind: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of the dataclass ``kind`` that ``plain`` names. Raises as ``from_plain``."""
    readers = _readers(kind)
    return {name: readers[name](value) for name, value in plain.items()}


_Reader = Callable[[Any], Any]


@cache
def _readers(kind: Any) -> dict[str, _Reader]:
    hints = get_type_hints(kind)
    return {name: _reader(hints[name]) for name in kind.__match_args__}


@cache
def _reader(hint: Any) -> _Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is None:  # None: one of several types, which its owner reads
        return lambda plain: plain
    if hint is float:
        return _float
    if hint in (bool, int, str):
        return lambda plain: plain if type(plain) is hint else _checked(plain, hint)
    if hint is bytes:
        return lambda plain: bytes.fromhex(_checked(plain, str))
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each is not type(None)]
        read = _reader(kinds[0] if len(kinds) == 1 else None)
        return lambda plain: None if plain is None else read(plain)
    if origin is tuple and arguments[1:] != (...,):
        readers = [_reader(each) for each in arguments]
        return lambda plain: tuple(_each(readers, plain))
    if origin in (tuple, list, frozenset):
        read = _reader(arguments[0])
        return lambda plain: origin(map(read, _checked(plain, list, tuple)))
    if origin is not None:  # a mapping
        key, read = arguments[0], _reader(arguments[1])
        return lambda plain: {key(name): read(each) for name, each in _checked(plain, dict).items()}
    if issubclass(hint, tuple):
        return lambda plain: hint(*_each(_readers(hint).values(), plain))
    if issubclass(hint, enum.Enum):
        return lambda plain: hint(plain)
    return lambda plain: hint(**fields_from(hint, _checked(plain, dict)))


def _float(plain: Any) -> float:
    """Raises TypeError, and ValueError for a whole number that is too large."""
    try:
        return float(_checked(plain, int, float))
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _each(readers: Collection[_Reader], plain: Any) -> list[Any]:
    return [read(each) for read, each in zip(readers, _checked(plain, list, tuple), strict=True)]


def _checked(plain: Any, *kinds: type[Any]) -> Any:
    """Raises TypeError for what is of none of ``kinds``: true is no number."""
    if type(plain) not in kinds:
        raise TypeError(f"{plain!r:.80} where {' or '.join(kind.__name__ for kind in kinds)} belongs")
    return plain
