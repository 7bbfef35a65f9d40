"""How codes become numbers: 32 of one column at once, written in LLVM's language as `tile` is.

In numba's the same loops over 32 rows spend most of their time on asking whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import types
from numba.core.base import BaseContext
from numba.core.typing.context import BaseContext as Typing
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from hetrun_numba.formats import COLUMNS

BYTE, WORD, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
BYTES, WORDS, FLOATS = (ir.VectorType(kind, COLUMNS) for kind in (BYTE, WORD, FLOAT))

Read = Callable[[ir.IRBuilder, ir.Value], ir.Value]  # a vector of codes as numbers


def _all(n: int) -> ir.Value:
    """The same whole number in all lanes."""
    return ir.Constant(WORDS, [n] * COLUMNS)


def _vector(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _spread(builder: ir.IRBuilder, number: ir.Value, kind: ir.Type) -> ir.Value:
    """A number in all lanes."""
    none = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(none, number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, none, _all(0))


def _bits(builder: ir.IRBuilder, address: ir.Value, shift: ir.Value, bits: int) -> ir.Value:
    """Some bits of each byte, from bit `shift` on."""
    wide = builder.zext(_vector(builder, address, BYTES), WORDS)
    by = _spread(builder, builder.trunc(shift, WORD), WORDS)
    return builder.and_(builder.lshr(wide, by), _all((1 << bits) - 1))


def _whole(builder: ir.IRBuilder, code: ir.Value) -> ir.Value:
    """A code as the number that it is."""
    return builder.sitofp(code, FLOATS)


def _halves(builder: ir.IRBuilder, code: ir.Value) -> ir.Value:
    """Twice the number that four bits are: a sign, two bits of exponent, one behind the point."""
    last, exponent = builder.and_(code, _all(1)), builder.and_(builder.lshr(code, _all(1)), _all(3))
    any_exponent = builder.icmp_unsigned("!=", exponent, _all(0))
    by = builder.select(any_exponent, builder.sub(exponent, _all(1)), _all(0))
    size = builder.shl(builder.select(any_exponent, builder.or_(last, _all(2)), last), by)
    negative = builder.icmp_unsigned("!=", builder.and_(code, _all(8)), _all(0))
    number = builder.sitofp(size, FLOATS)
    return builder.select(negative, builder.fneg(number), number)


def _column(
    bits: int,
    high: bool = False,
    least: bool = False,
    read: Read = _whole,
) -> Callable[..., None]:
    """out = (code - centre) * scale + least, for a column of 32 rows; all but `centre` and the shifts are
    addresses."""

    def build(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> None:
        del context, signature
        codes, shift, more, bit, centre, scales, lowest, out = args
        code = _bits(builder, codes, shift, bits)
        if high:
            code = builder.or_(code, builder.shl(_bits(builder, more, bit, 1), _all(bits)))
        number = builder.fsub(read(builder, code), _spread(builder, centre, FLOATS))
        number = builder.fmul(number, _vector(builder, scales, FLOATS))
        if least:
            number = builder.fadd(number, _vector(builder, lowest, FLOATS))
        builder.store(number, builder.inttoptr(out, FLOATS.as_pointer()), align=4)

    @intrinsic
    def column(
        typing: Typing,
        codes: types.Type,
        shift: types.Type,
        more: types.Type,
        bit: types.Type,
        centre: types.Type,
        scales: types.Type,
        lowest: types.Type,
        out: types.Type,
    ) -> tuple[Signature, Callable[..., None]]:
        del typing
        whole = types.intp
        return types.void(whole, whole, whole, whole, types.float32, whole, whole, whole), build

    return column


one_bit, two_bits = _column(1), _column(2)
five_bits, five_bits_and_least = _column(4, high=True), _column(4, high=True, least=True)
small_floats = _column(4, read=_halves)
