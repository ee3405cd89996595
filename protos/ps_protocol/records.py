"""Decides how a dataclass becomes a dict that is written and forgotten: its fields are not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """The fields of ``record`` by name, as they are; a dataclass among them stays one.

    ``dataclasses.asdict`` copies all that is in them.
    """
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
