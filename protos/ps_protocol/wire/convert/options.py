"""Between the arguments of optimizers and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Option, OptionDifference, Options
from ps_protocol.model.tables import RowOptions
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.v1 import shard_pb2

_Value = TypeVar("_Value")


def changed_options(declared: Mapping[str, _Value], options: Mapping[str, _Value]) -> Mapping[str, _Value]:
    """Those of ``options`` that are not as ``declared``: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    return {
        name: value
        for name, value in options.items()
        if name not in declared or (value is not declared[name] and repr(value) != repr(declared[name]))
    }


def options_to_pb(options: Options) -> pb.Options:
    """Equal options give equal messages. Raises InvalidRequest for a value that no message can have."""
    found = []
    for name in sorted(options):
        try:
            found.append(pb.Option(name=name, value=option_to_pb(options[name])))
        except (TypeError, ValueError) as error:  # numbers beyond 64 bits, text that is not Unicode
            raise InvalidRequest(
                f"the optimizer argument {name!r} cannot be sent",
                expected="a number of 64 bits, text, True, False, None, or a list of them",
                actual=repr(options[name])[:200],
            ) from error
    return pb.Options(options=found)


def option_to_pb(value: Option) -> pb.OptionValue:
    """Raises TypeError, ValueError."""
    match value:
        case bool():
            return pb.OptionValue(truth=value)
        case float():
            return pb.OptionValue(number=value)
        case int():
            return pb.OptionValue(integer=value)
        case str():
            return pb.OptionValue(text=value)
        case None:
            return pb.OptionValue(none=pb.NoValue())
        case list():
            return pb.OptionValue(list=pb.OptionValues(values=map(option_to_pb, value)))
    raise TypeError(type(value).__name__)


def options_from_pb(message: pb.Options) -> Options:
    """Raises InvalidRequest for a name that comes twice, and for one without a value."""
    options = {each.name: option_from_pb(each.value) for each in message.options}
    if len(options) < len(message.options):
        names = [each.name for each in message.options]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest("an optimizer argument is given twice", expected="each name once", actual=repr(twice))
    return options


def option_from_pb(message: pb.OptionValue) -> Option:
    """Raises InvalidRequest where there is no value."""
    match message.WhichOneof("value"):
        case "number":
            return message.number
        case "truth":
            return message.truth
        case "integer":
            return message.integer
        case "none":
            return None
        case "text":
            return message.text
        case "list":
            return [option_from_pb(each) for each in message.list.values]
        case _:
            raise InvalidRequest("an optimizer argument has no value that this version knows")


def row_options_from_pb(message: pb.Options) -> RowOptions:
    """Raises InvalidRequest as ``options_from_pb``, and for an argument that is no number."""
    options = options_from_pb(message)
    wrong = {name: value for name, value in options.items() if type(value) not in (int, float)}
    if wrong:
        raise InvalidRequest("row options are not numbers by name", actual=repr(wrong)[:200])
    try:
        return {name: float(value) for name, value in options.items()}  # type: ignore[arg-type]
    except OverflowError as error:
        raise InvalidRequest(
            "a row option is too large", actual=repr(options)[:200], expected="numbers of 64 bits"
        ) from error


def differences_to_pb(differences: Iterable[OptionDifference]) -> list[shard_pb2.OptionDifference]:
    """The messages of ``differences``."""
    return [
        shard_pb2.OptionDifference(
            **{"table" if each.is_table else "group": each.place},
            name=each.name,
            used_rank=each.used_rank,
            used=option_to_pb(each.used),
            own=option_to_pb(each.own),
        )
        for each in differences
    ]


def differences_from_pb(messages: Iterable[shard_pb2.OptionDifference]) -> list[OptionDifference]:
    """The differences that a shard reports. Raises InvalidRequest for one without its values."""
    found = []
    for each in messages:
        is_table = each.WhichOneof("place") == "table"
        place = each.table if is_table else each.group
        used, own = option_from_pb(each.used), option_from_pb(each.own)
        found.append(OptionDifference(place, is_table, each.name, each.used_rank, used, own))
    return found
