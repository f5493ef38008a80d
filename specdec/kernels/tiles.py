"""Products of bfloat16 numbers in AMX's tile registers, on the CPUs that have them.

A tile is up to 16 rows of 64 bytes. One instruction multiplies a tile's rows, which are pairs of numbers,
with a tile of columns, whose rows are pairs as well, and adds to float32 sums [rows, 16]. Every row's sums
are its own: they do not depend, bit for bit, on the rows beside it or on how many these are. Rows that lie
across two cache lines take seven times as long: arrays come from `specdec.kernels.memory`.

The tiles are named here, not chosen by LLVM: between `configure` and `release` a thread's tiles belong to the
functions of this module.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.kernels import simd

ROWS = 16
"""Most rows of a tile."""
LANES = simd.LANES
"""Columns of a tile of sums."""
PAIRS = 16
"""Pairs of numbers in a row."""
_LINE = 64
"""Bytes that memory is read by."""
NUM_SUMS = 4
"""Tiles of sums that are kept at once."""

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_FEATURES = ("amx-tile", "amx-bf16", "avx512bf16")


def _may_use_tiles() -> bool:
    """Ask Linux for the registers, for all threads of this process; asking again does no harm."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = llvmlite.binding.get_host_cpu_features()
    if not all(features.get(name, False) for name in _FEATURES):
        return False
    asked: int = ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return asked == 0


IS_AVAILABLE = _may_use_tiles()
"""Whether the functions below may be called."""

_LEFT, _HALF_LEFT, _RIGHT, _HALF_RIGHT = range(NUM_SUMS, NUM_SUMS + 4)
"""Tiles 0 to 3 are sums. A half one has `PAIRS` / 2 pairs."""


def _configurations() -> npt.NDArray[np.uint8]:
    """[rows of the left tiles and the sums, 64]: what the CPU's instruction takes."""
    tables = np.zeros((ROWS + 1, 64), np.uint8)
    tables[:, 0] = 1  # the palette
    for num_rows, table in enumerate(tables):
        shapes = [(num_rows, 4 * LANES)] * NUM_SUMS
        shapes += [(num_rows, 4 * PAIRS), (num_rows, 2 * PAIRS), (PAIRS, 4 * LANES), (PAIRS // 2, 4 * LANES)]
        for idx, (rows, num_bytes) in enumerate(shapes):
            table[16 + 2 * idx], table[48 + idx] = num_bytes, rows
    return tables


CONFIGURATIONS = _configurations()
"""For attention."""


def _product_configurations() -> npt.NDArray[np.uint8]:
    """The same with two tiles of rows and two of weights, all of them whole."""
    tables = np.zeros((ROWS + 1, 64), np.uint8)
    tables[:, 0] = 1
    tables[:, 16:32:2] = 4 * LANES
    tables[:, 48:54] = np.arange(ROWS + 1)[:, None]
    tables[:, 54:56] = PAIRS
    return tables


PRODUCT_CONFIGURATIONS = _product_configurations()
"""For `multiply`."""

_INT8, _INTP = ir.IntType(8), ir.IntType(64)


def _do(builder: Any, name: str, *args: Any) -> None:
    """An instruction; numbers are names of tiles."""
    operands = [_INT8(arg) if isinstance(arg, int) else arg for arg in args]
    function_type = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}")
    builder.call(function, operands)


class _Memory:
    """An array's address and strides while code is made."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any) -> None:
        self._builder = builder
        self._view = context.make_array(array_type)(context, builder, array)
        self.strides = cgutils.unpack_tuple(builder, self._view.strides, array_type.ndim)
        self.shape = cgutils.unpack_tuple(builder, self._view.shape, array_type.ndim)

    def address(self, indices: list[Any]) -> Any:
        """Of what is at the first axes' indices, in bytes."""
        builder = self._builder
        address = builder.bitcast(self._view.data, _INT8.as_pointer())
        for index, stride in zip(indices, self.strides, strict=False):
            address = builder.gep(address, [builder.mul(index, stride)])
        return address

    def tile(self, tile: int, instruction: str, indices: list[Any], axis: int) -> None:
        """Load or store a tile at the indices, whose rows are neighbours along ``axis``."""
        _do(self._builder, instruction, tile, self.address(indices), self.strides[axis])

    def load(self, tile: int, indices: list[Any], axis: int) -> None:
        self.tile(tile, "tileloadd64", indices, axis)

    def load_once(self, tile: int, indices: list[Any], axis: int) -> None:
        """Load what will not be loaded again soon: it takes no room in the first cache."""
        self.tile(tile, "tileloaddt164", indices, axis)

    def store(self, tile: int, indices: list[Any], axis: int) -> None:
        self.tile(tile, "tilestored64", indices, axis)


def _memories(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """The arguments, arrays as `_Memory`."""
    return [
        _Memory(context, builder, kind, arg) if isinstance(kind, types.Array) else arg
        for kind, arg in zip(signature.args, args, strict=True)
    ]


@intrinsic  # type: ignore[untyped-decorator]
def configure(typing_context: Any, configurations: Any, num_rows: Any) -> Any:
    """Let this thread use tiles of so many rows; ``configurations`` are `CONFIGURATIONS`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(configurations)(context, builder, args[0])
        row = cgutils.get_item_pointer(
            context, builder, configurations, view, [args[1], _INTP(0)], wraparound=False
        )
        _do(builder, "ldtilecfg", builder.bitcast(row, _INT8.as_pointer()))
        return context.get_dummy_value()

    return types.none(configurations, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def release(typing_context: Any) -> Any:
    """Give the tiles back: a thread that holds none has less to save when it is interrupted."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _do(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), codegen


def score(num_blocks: int) -> Any:
    """Scores of a tile of queries over ``num_blocks`` blocks of keys.

    The function made sets scores[:, column : column + 16 * num_blocks] to the products of
    queries[row : row + rows], [.., head_dim] bfloat16, with the keys, [blocks, heads, head_dim / 2, 16, 2],
    of the blocks table[first : first + num_blocks]. head_dim is a multiple of 32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def score_blocks(
        typing_context: Any,
        queries: Any,
        row: Any,
        keys: Any,
        table: Any,
        first: Any,
        head: Any,
        scores: Any,
        column: Any,
    ) -> Any:
        index = types.intp

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, row, right, _, first, head, out, column = _memories(context, builder, signature, args)
            view, zero = context.make_array(table)(context, builder, args[3]), _INTP(0)
            blocks = []
            for i in range(num_blocks):
                place = [builder.add(first, _INTP(i))]
                entry = cgutils.get_item_pointer(context, builder, table, view, place, wraparound=False)
                blocks.append(builder.sext(builder.load(entry), _INTP))
                _do(builder, "tilezero", i)
            with cgutils.for_range_slice(builder, zero, right.shape[2], _INTP(PAIRS)) as (pair, _):
                left.load(_LEFT, [row, builder.mul(pair, _INTP(2))], 0)
                for i, block in enumerate(blocks):
                    right.load(_RIGHT, [block, head, pair], 2)
                    _do(builder, "tdpbf16ps", i, _LEFT, _RIGHT)
            for i in range(num_blocks):
                out.store(i, [zero, builder.add(column, _INTP(LANES * i))], 0)
            return context.get_dummy_value()

        return types.none(queries, index, keys, table, index, index, scores, index), codegen

    return score_blocks


def _transfer(is_load: bool, num_tiles: int) -> Any:
    """Sums[row : row + rows, column : column + 16 * num_tiles] to or from the tiles of sums."""

    @intrinsic  # type: ignore[untyped-decorator]
    def transfer(typing_context: Any, sums: Any, row: Any, column: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory, row, column = _memories(context, builder, signature, args)
            for i in range(num_tiles):
                place = [row, builder.add(column, _INTP(LANES * i))]
                (memory.load if is_load else memory.store)(i, place, 0)
            return context.get_dummy_value()

        return types.none(sums, types.intp, types.intp), codegen

    return transfer


def load_sums(num_tiles: int) -> Any:
    """See `_transfer`."""
    return _transfer(True, num_tiles)


def store_sums(num_tiles: int) -> Any:
    """See `_transfer`."""
    return _transfer(False, num_tiles)


def add_values(num_tiles: int) -> Any:
    """Weighted values of a block, added to the tiles of sums.

    The function made adds the products of weights[:, first : first + 16], bfloat16, with
    values[block, head, :, column : column + 16 * num_tiles, :], [8, .., 2]: pairs of positions.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def add_block(
        typing_context: Any, weights: Any, first: Any, values: Any, block: Any, head: Any, column: Any
    ) -> Any:
        index = types.intp

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, first, right, block, head, column = _memories(context, builder, signature, args)
            zero = _INTP(0)
            left.load(_HALF_LEFT, [zero, first], 0)
            for i in range(num_tiles):
                right.load(_HALF_RIGHT, [block, head, zero, builder.add(column, _INTP(LANES * i))], 2)
                _do(builder, "tdpbf16ps", i, _HALF_LEFT, _HALF_RIGHT)
            return context.get_dummy_value()

        return types.none(weights, index, values, index, index, index), codegen

    return add_block


def multiply(num_row_tiles: int, *, reads_weights_once: bool) -> Any:
    """A piece of a product: ``num_row_tiles`` tiles of rows, as configured, times two panels of 16 outputs.

    The function made sets sums[16 * i + r, 16 * p + j] to x[row + 16 * i + r], bfloat16, times output j of
    panels[panel + p], [panels, in / 2, 16] pairs of bfloat16. Either the weights or the rows are used again
    soon, by the next pieces.
    """
    row_tiles, weight_tiles = range(NUM_SUMS, NUM_SUMS + num_row_tiles), range(NUM_SUMS + 2, NUM_SUMS + 4)
    totals = {(i, p): 2 * i + p for i in range(num_row_tiles) for p in range(2)}

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply_piece(typing_context: Any, x: Any, row: Any, panels: Any, panel: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, row, right, panel, out = _memories(context, builder, signature, args)
            zero = _INTP(0)
            load_row, load_weight = (
                (left.load, right.load_once) if reads_weights_once else (left.load_once, right.load)
            )
            for total in totals.values():
                _do(builder, "tilezero", total)
            with cgutils.for_range_slice(builder, zero, right.shape[1], _INTP(PAIRS)) as (pair, _):
                for i, tile in enumerate(row_tiles):
                    load_row(tile, [builder.add(row, _INTP(ROWS * i)), builder.mul(pair, _INTP(2))], 0)
                    for p, weights in enumerate(weight_tiles):
                        if i == 0:
                            load_weight(weights, [builder.add(panel, _INTP(p)), pair, zero], 1)
                        _do(builder, "tdpbf16ps", totals[i, p], tile, weights)
            for (i, p), total in totals.items():
                out.store(total, [_INTP(ROWS * i), _INTP(LANES * p)], 0)
            return context.get_dummy_value()

        return types.none(x, types.intp, panels, types.intp, sums), codegen

    return multiply_piece


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, block: Any, head: Any) -> Any:
    """Ask for a block's keys or values of a head, array[block, head], which lie together."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory, block, head = _memories(context, builder, signature, args)
        start = memory.address([block, head])
        with cgutils.for_range_slice(builder, _INTP(0), memory.strides[1], _INTP(_LINE)) as (offset, _):
            simd.prefetch(builder, builder.gep(start, [offset]))
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp), codegen
