"""What compiled code needs to read memory by address, and to ask for it before it is read."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

IDS = types.Array(types.int64, 1, "C", readonly=True)
ROWS = types.Array(types.float32, 2, "C", readonly=True)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An int64 as a pointer, for ``numba.carray``."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), build


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for an item of a C-contiguous array, numbered from 0, soon to be read: latency is what finding rows costs."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        item = builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])
        byte = builder.bitcast(item, ir.IntType(8).as_pointer())
        flags = [ir.Constant(ir.IntType(32), each) for each in (0, 3, 1)]
        kind = ir.FunctionType(ir.VoidType(), [byte.type, *(flag.type for flag in flags)])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [byte.type], kind), [byte, *flags])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


#: As they are called in compiled code.
pointer: Any = _pointer
prefetch: Any = _prefetch
