"""Checks the optimizer arguments that come with a push against those the model was declared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ps_protocol.convert import options_from_json
from ps_protocol.convert_tables import row_options_from_json
from ps_protocol.errors import InvalidRequest
from ps_protocol.model import ModelSpec, Option, Options
from ps_protocol.optimizers import EXECUTION_HINTS
from ps_protocol.option_ranges import require_in_range
from ps_protocol.tables import RowOptions, validate_options
from ps_server.optimizers import check_options


def merge_options(spec: ModelSpec, texts: Sequence[str]) -> tuple[Options, ...]:
    """Per group, the declared arguments overlaid with the pushed ones.

    Raises InvalidRequest when groups are missing or too many, a name was not declared, or a value is of another kind or
    not finite; UnsupportedOptimizer when it is out of range or torch refuses it. So no push brings an
    update that fails half-way.
    """
    if len(texts) != len(spec.group_options):
        raise InvalidRequest(
            f"options for the wrong number of parameter groups of model '{spec.name}'",
            expected=str(len(spec.group_options)),
            actual=str(len(texts)),
        )
    merged = tuple(
        _merge(spec.name, group, declared, options_from_json(text))
        for group, (declared, text) in enumerate(zip(spec.group_options, texts, strict=True))
    )
    require_in_range(spec, merged)
    check_options(spec, merged)
    return merged


def merge_row_options(spec: ModelSpec, texts: Sequence[str]) -> tuple[RowOptions, ...]:
    """Per table, the declared arguments overlaid with the pushed ones. Raises InvalidRequest, UnsupportedOptimizer."""
    if len(texts) != len(spec.tables):
        raise InvalidRequest(
            f"options for the wrong number of tables of model '{spec.name}'",
            expected=str(len(spec.tables)),
            actual=str(len(texts)),
        )
    merged = tuple(
        {**table.options, **row_options_from_json(text)} for table, text in zip(spec.tables, texts, strict=True)
    )
    for table, options in zip(spec.tables, merged, strict=True):
        validate_options(table, options)
    return merged


def _merge(model: str, group: int, declared: Options, pushed: Options) -> Options:
    for name, value in pushed.items():
        if name not in declared or not (name in EXECUTION_HINTS or _same_kind(declared[name], value)):
            # JSON names characters that no message can hold.
            shown = name.encode(errors="backslashreplace").decode()
            raise InvalidRequest(
                f"optimizer argument '{shown}' of group {group} of model '{model}' does not fit",
                expected=f"{name}={declared[name]!r}" if name in declared else ", ".join(sorted(declared)),
                actual=f"{shown}={value!r}",
                remedy="push the arguments the optimizer was declared with",
            )
    return {**declared, **pushed}


def _same_kind(declared: Option, value: Option) -> bool:
    """Whether ``value`` can stand where ``declared`` stood."""
    if declared is None or value is None:
        return declared is value
    if isinstance(declared, bool) or isinstance(value, bool):
        return isinstance(declared, bool) and isinstance(value, bool)
    if isinstance(declared, list) and isinstance(value, list):
        return len(declared) == len(value) and all(map(_same_kind, declared, value))
    if isinstance(declared, (int, float)):
        return isinstance(value, (int, float)) and _finite(value)
    return type(declared) is type(value)


def _finite(value: float) -> bool:
    """Whether torch can reckon with ``value``; JSON knows NaN, and integers beyond all floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
