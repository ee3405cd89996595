"""A record becomes a dict without copies of what is in it. Costs nothing."""

from dataclasses import dataclass, field

from ps_protocol.records import fields_of


@dataclass(frozen=True, slots=True)
class _Inner:
    number: int = 1


@dataclass(frozen=True, slots=True)
class _Record:
    inner: _Inner
    name: str = "a"
    items: list[int] = field(default_factory=list)


def test_the_fields_of_a_record_are_in_order_and_not_copied():
    record = _Record(_Inner(), items=[1, 2])
    found = fields_of(record)
    assert found == {"inner": record.inner, "name": "a", "items": [1, 2]}
    assert list(found) == ["inner", "name", "items"]
    assert found["items"] is record.items
    assert found["inner"] is record.inner
