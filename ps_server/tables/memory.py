"""What compiled code needs to read memory by address and to ask for it early, and its passes over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from ps_protocol.model.kernels import kernel

IDS = types.Array(types.int64, 1, "C", readonly=True)
ROWS = types.Array(types.float32, 2, "C", readonly=True)


def _view(item: Any) -> Any:
    """As ``bytes_at``, for items of another type. ``numba.carray`` would count references."""

    @intrinsic
    def view(typing_context: Any, address: Any, size: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = signature.return_type
            made = context.make_array(kind)(context, builder)
            item_bytes = context.get_abi_sizeof(context.get_data_type(kind.dtype))
            data = builder.inttoptr(arguments[0], made.data.type)
            strides = [context.get_constant(types.intp, item_bytes)]
            populate_array(made, data, [arguments[1]], strides, item_bytes, None)  # type: ignore[no-untyped-call]
            return made._getvalue()

        return types.Array(item, 1, "C")(types.int64, types.int64), build

    return view


@intrinsic
def _write_zero(typing_context: Any, array: Any, index: Any) -> Any:
    """Write 0 to an item of a C-contiguous array of bytes if it is 0, in one piece with comparing it.

    Adding nothing would be compiled to a read.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        item = builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])
        zero = ir.Constant(ir.IntType(8), 0)
        builder.cmpxchg(item, zero, zero, "monotonic", "monotonic")
        return context.get_dummy_value()

    return types.void(array, types.int64), build


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


#: As they are called in compiled code: items of memory at an address, and how many.
bytes_at: Any = _view(types.uint8)
words_at: Any = _view(types.uint32)
prefetch: Any = _prefetch
write_zero: Any = _write_zero


@kernel(types.void(types.uint8[::1], types.int64, types.int64, types.int64))
def take_pages(memory: Any, begin: Any, end: Any, page_bytes: Any) -> None:
    """Have the system allocate the pages of bytes [begin, end), which anybody may read and write meanwhile."""
    for at in range(begin // page_bytes * page_bytes, end, page_bytes):
        write_zero(memory, at)


FLOATS = types.float32[:, ::1]
#: Rows whose memory is asked for before it is their turn; and where next to nothing is done with each.
_AHEAD = 24
_FAR_AHEAD = 64


@njit(inline="always")
def next_row(rows: Any, found: Any, i: Any) -> Any:
    """The row of the ``i``-th gradient; one that comes soon is asked for."""
    if i + _AHEAD < found.size and found[i + _AHEAD] >= 0:
        begin = found[i + _AHEAD] * rows.shape[1]
        prefetch(rows, begin)
        prefetch(rows, begin + rows.shape[1] - 1)
    return found[i]


@kernel(types.void(FLOATS, IDS, FLOATS))
def read(rows: Any, found: Any, out: Any) -> None:
    """As many columns of the rows as ``out`` has; what has no row stays as it is."""
    for i in range(found.size):
        row = next_row(rows, found, i)
        if row >= 0:
            for column in range(out.shape[1]):
                out[i, column] = rows[row, column]


@kernel(types.void(types.int64[::1], types.uint32[::1], IDS, types.int64))
def touch(touched: Any, uses: Any, rows: Any, update: Any) -> None:
    """Set ``touched`` of these rows, and count a use of each where ``uses`` is not empty."""
    for i in range(rows.size):
        if i + _FAR_AHEAD < rows.size:
            prefetch(touched, rows[i + _FAR_AHEAD])
        touched[rows[i]] = update
    if uses.size > 0:
        for i in range(rows.size):
            uses[rows[i]] += np.uint32(1)
