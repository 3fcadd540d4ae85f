"""Arithmetic on the words of packets: elements of any type, reduced in the order of the ranks."""

import triton
import triton.language as tl

from iris_triton.collectives.parts.elements import combine, finished, widened


@triton.constexpr_function
def _unsigned(bits):
    return {8: tl.uint8, 16: tl.uint16}[bits]


@triton.jit
def _part(word, index: tl.constexpr, DT: tl.constexpr):
    """Extract an element of 8 or 16 bits from a word."""
    bits: tl.constexpr = DT.primitive_bitwidth
    return (word >> (bits * index)).to(_unsigned(bits)).to(DT, bitcast=True)


@triton.jit
def _placed(value, index: tl.constexpr, DT: tl.constexpr):
    """Insert an element of 8 or 16 bits into a word of zeros."""
    bits: tl.constexpr = DT.primitive_bitwidth
    return value.to(DT).to(_unsigned(bits), bitcast=True).to(tl.int32) << (bits * index)


@triton.jit
def _reduced_part(
    words, k: tl.constexpr, index: tl.constexpr, N: tl.constexpr, W: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr
):
    total = widened(_part(words[k], index, DT))
    for i in tl.static_range(1, N):
        total = combine(total, widened(_part(words[W * i + k], index, DT)), OP)
    return finished(total, OP, N)


@triton.jit
def _two_halves(low, high, DT: tl.constexpr):
    """Round two float32 to 16 bits and pack them into one word."""
    if DT.is_bf16():
        text: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    else:
        text: tl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $2;"
    return tl.inline_asm_elementwise(text, "=r,r,r", [high, low], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _reduced_word(words, k: tl.constexpr, N: tl.constexpr, W: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr):
    if DT.primitive_bitwidth == 32:
        total = words[k].to(DT, bitcast=True)
        for i in tl.static_range(1, N):
            total = combine(total, words[W * i + k].to(DT, bitcast=True), OP)
        return finished(total, OP, N).to(tl.int32, bitcast=True)
    elif DT.is_floating():
        low = _reduced_part(words, k, 0, N, W, DT, OP)
        high = _reduced_part(words, k, 1, N, W, DT, OP)
        return _two_halves(low, high, DT)
    else:
        word = words[k] * 0
        for index in tl.static_range(32 // DT.primitive_bitwidth):
            word = word | _placed(_reduced_part(words, k, index, N, W, DT, OP), index, DT)
        return word


@triton.jit
def _long(words, k: tl.constexpr, DT: tl.constexpr):
    return ((words[k].to(tl.int64) & 0xFFFFFFFF) | (words[k + 1].to(tl.int64) << 32)).to(DT, bitcast=True)


@triton.jit
def _reduced_pair(words, k: tl.constexpr, N: tl.constexpr, W: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr):
    total = _long(words, k, DT)
    for i in tl.static_range(1, N):
        total = combine(total, _long(words, W * i + k, DT), OP)
    total = finished(total, OP, N).to(tl.int64, bitcast=True)
    return total.to(tl.int32), (total >> 32).to(tl.int32)


@triton.jit
def reduced(words, N: tl.constexpr, W: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr):
    """Reduce the data of N packets: 16-bit floats in float32, rounded once.

    Args:
        words: N times W blocks, in the order in which they are reduced; W blocks are returned.
        N, W: number of packets; words of data in a packet, 2 or 4.
        DT, OP: the elements' type; the reduction's name.
    """
    total = ()
    if DT.primitive_bitwidth == 64:
        for k in tl.static_range(0, W, 2):
            total = total + _reduced_pair(words, k, N, W, DT, OP)
    else:
        for k in tl.static_range(W):
            total = total + (_reduced_word(words, k, N, W, DT, OP),)  # noqa: RUF005 - the compiler knows no star
    return total


@triton.jit
def elements_of(words, DT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the data of packets, four blocks of words, as one block of BLOCK elements of 16 or 32 bits in order."""
    if DT.primitive_bitwidth == 32:
        first = tl.join(words[0].to(DT, bitcast=True), words[2].to(DT, bitcast=True))
        second = tl.join(words[1].to(DT, bitcast=True), words[3].to(DT, bitcast=True))
        return tl.reshape(tl.join(first, second), (BLOCK,))
    else:  # what is joined last changes fastest: halves of a word, then its last bit, then its first one
        low = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        high = low >> 16
        both = tl.join(low.to(tl.int16), high.to(tl.int16))
        return tl.reshape(both, (BLOCK,)).to(DT, bitcast=True)


@triton.jit
def words_of(elements, PACKETS: tl.constexpr):
    """Return a block of elements of 16 or 32 bits as four blocks of words of PACKETS packets: undoes `elements_of`."""
    if elements.dtype.primitive_bitwidth == 32:
        words = tl.reshape(elements.to(tl.int32, bitcast=True), (PACKETS, 2, 2))
    else:
        halves = tl.reshape(elements.to(tl.int16, bitcast=True).to(tl.int32), (PACKETS, 2, 2, 2))
        low, high = tl.split(halves)
        words = (low & 0xFFFF) | (high << 16)
    even, odd = tl.split(words)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
