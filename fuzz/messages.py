"""Makes messages: valid ones of any type, with edge values, and mutations of their bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INTEGERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    20,
    64,
    4096,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 47,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_FLOATS = (0.0, 0.01, 0.5, 1.0, -1.0, 1e12, 1e308, 1e-320, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "name", "\x1b[31m", "a\nb", "[/red]", "../..", "/etc", "x" * 300, "ü" * 200, "\u202e", "0" * 5000)
_OPTIONS = (
    *(
        "{}",
        '{"lr": 0.1}',
        '{"lr": 0}',
        '{"lr": -1}',
        '{"lr": 1e308}',
        '{"lr": NaN}',
        '{"eps": 0}',
        '{"momentum": null}',
    ),
    *('{"betas": [0.9, null]}', "[" * 3000, '{"lr": 1e999}', "null", '{"weight_decay": 1e308}', '{"foreach": 1}'),
)
_OPTIMIZERS = (
    "torch.optim.SGD",
    "torch.optim.Adam",
    "torch.optim.RMSprop",
    "torch.optim.LBFGS",
    "os.system",
    "adagrad",
)

#: Names of optimizer arguments, and of what this fuzzer's model is made of.
_ARGUMENTS = ("lr", "eps", "betas", "momentum", "weight_decay", "max_norm", "foreach", "other", *_TEXTS)

#: What a field of some name holds, beside the edge values of its type.
Pools = Mapping[str, Sequence[Any]]

_BY_NAME: Pools = {
    "group_options": _OPTIONS,
    "options": _OPTIONS,
    "name": _ARGUMENTS,
    "optimizer": _OPTIMIZERS,
    "folder": ("", "/", "..", "/tmp", "/dev/zero", "checkpoint-1", "a/b", "\0"),
    "address": ("", "127.0.0.1:1", "localhost", "[::1]:99999", "x" * 200 + ":1"),
    "kind": ("uniform", "normal", "constant", "other"),
}

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}

#: A field that is filled at all.
_FILLED = 0.7
_DEEPEST = 5


class Generator:
    """Draws messages from one seed. ``pools``: by field name, values that a real caller would send."""

    def __init__(self, seed: int, pools: Pools) -> None:
        self.random = random.Random(seed)
        self._pools = pools

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        """A message of ``kind`` that parses."""
        made = kind()
        descriptor: Descriptor = kind.DESCRIPTOR
        chosen = {oneof.name: self.random.choice(oneof.fields).name for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            group = field.containing_oneof
            wanted = chosen[group.name] == field.name if group else self.random.random() < _FILLED
            if wanted and depth < _DEEPEST:
                self._fill(made, field, depth)
        return made

    def mutated(self, data: bytes) -> bytes:
        """``data`` with some of its bytes changed, lost, repeated or added."""
        changed, draw = bytearray(data), self.random
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            at = draw.randint(0, len(changed))
            match draw.randrange(6):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << draw.randrange(8)
                case 1:
                    del changed[at : at + draw.randint(1, 8)]
                case 2:
                    changed[at:at] = draw.randbytes(draw.randint(1, 8))
                case 3:
                    changed[at:at] = changed[at : at + draw.randint(1, 8)]
                case 4:
                    del changed[at:]
                case _:
                    changed[at : at + 4] = struct.pack("<i", draw.choice((-1, 0, 1, 1 << 30)))
        return bytes(changed)

    def near(self, template: Message) -> Message:
        """A copy of ``template`` with none, one or two of its fields drawn again."""
        made = type(template)()
        made.CopyFrom(template)
        for _ in range(self.random.choice((0, 1, 1, 2))):
            self._redraw(made)
        return made

    def bytes_of(
        self, kind: type[Message], allowed: Callable[[Message], bool], template: Message | None = None
    ) -> bytes:
        """A message on the wire: near ``template``, or of any fields; a third with mutated bytes.

        ``allowed`` refuses what the job lets every caller do to all others.
        """
        while True:
            drawn = self.near(template) if template and self.random.random() < 0.8 else self.message(kind)
            data = drawn.SerializePartialToString()
            if self.random.random() < 0.35:
                data = self.mutated(data)
            parsed = kind()
            try:
                parsed.ParseFromString(data)
            except Exception:  # noqa: BLE001 -- whatever protobuf calls it: this is the receiver's to refuse
                return data
            if allowed(parsed):
                return data

    def _redraw(self, made: Message, depth: int = 0) -> None:
        inner = [value for field, value in made.ListFields() if field.message_type and not field.is_repeated]
        if inner and self.random.random() < 0.8:
            self._redraw(self.random.choice(inner), depth + 1)
        elif made.DESCRIPTOR.fields:
            field = self.random.choice(made.DESCRIPTOR.fields)
            made.ClearField(field.name)
            if self.random.random() < 0.85:
                self._fill(made, field, depth)

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if not field.is_repeated:
            self._set(made, field, depth)
            return
        held = getattr(made, field.name)
        count = self.random.choice((0, 1, 1, 2, 3, 40)) if depth < 2 else 1
        if field.message_type and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(min(count, 3)):
                if value.message_type is None:
                    held[self._value(key)] = self._value(value)
            return
        for _ in range(count):
            if field.message_type:
                held.append(self.message(GetMessageClass(field.message_type), depth + 1))
            else:
                held.append(self._value(field))

    def _set(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type:
            getattr(made, field.name).CopyFrom(self.message(GetMessageClass(field.message_type), depth + 1))
        else:
            setattr(made, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        draw = self.random
        pool = self._pools.get(field.name) or _BY_NAME.get(field.name)
        if pool and field.cpp_type != FieldDescriptor.CPPTYPE_ENUM and draw.random() < 0.8:
            return draw.choice(pool)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return draw.randbytes(draw.choice((0, 1, 4, 8, 16, 64, 400)))
                return draw.choice(_TEXTS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return draw.choice([*(value.number for value in field.enum_type.values), 77])
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return draw.choice(_FLOATS)
            case kind:
                low, high = _RANGES[kind]
                return max(low, min(draw.choice(_INTEGERS) * draw.choice((1, 1, 1, -1)), high))
