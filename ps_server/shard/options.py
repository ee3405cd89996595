"""Checks the optimizer arguments that come with a push against those the model was declared with."""

from __future__ import annotations

from collections.abc import Sequence

from ps_protocol.convert import options_from_json
from ps_protocol.errors import InvalidRequest
from ps_protocol.model import ModelSpec, Option, Options


def merge_options(spec: ModelSpec, texts: Sequence[str]) -> tuple[Options, ...]:
    """Per group, the declared arguments overlaid with the pushed ones.

    Raises InvalidRequest when groups are missing or too many, a name was not declared, or a value is of another kind.
    """
    if len(texts) != len(spec.group_options):
        raise InvalidRequest(
            f"options for the wrong number of parameter groups of model '{spec.name}'",
            expected=str(len(spec.group_options)),
            actual=str(len(texts)),
        )
    return tuple(
        _merge(spec.name, group, declared, options_from_json(text))
        for group, (declared, text) in enumerate(zip(spec.group_options, texts, strict=True))
    )


def _merge(model: str, group: int, declared: Options, pushed: Options) -> Options:
    for name, value in pushed.items():
        if name not in declared or not _same_kind(declared[name], value):
            raise InvalidRequest(
                f"optimizer argument '{name}' of group {group} of model '{model}' does not fit",
                expected=f"{name}={declared[name]!r}" if name in declared else ", ".join(sorted(declared)),
                actual=f"{name}={value!r}",
                remedy="push the arguments the optimizer was declared with",
            )
    return {**declared, **pushed}


def _same_kind(declared: Option, value: Option) -> bool:
    """Whether ``value`` can stand where ``declared`` stood."""
    if declared is None or value is None:
        return True
    if isinstance(declared, bool) or isinstance(value, bool):
        return isinstance(declared, bool) and isinstance(value, bool)
    if isinstance(declared, list) and isinstance(value, list):
        return len(declared) == len(value) and all(map(_same_kind, declared, value))
    if isinstance(declared, (int, float)):
        return isinstance(value, (int, float))
    return type(declared) is type(value)
