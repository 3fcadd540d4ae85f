"""Loads and stores of tensors for packets: vectors if everything is aligned, else elements, also strided ones.

A tensor is an address, and a byte of it is counted in the order of its elements, as if it was dense.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from iris_triton.collectives.packets.assembly import load_assembly, run_assembly, store_assembly
from iris_triton.collectives.packets.packet import data_words
from iris_triton.collectives.parts.elements import strided


@triton.constexpr_function
def _step(item):
    """Return the bytes of one access: an element, or a word of it."""
    return min(item, 4)


@triton.constexpr_function
def _integer(nbytes):
    return {1: tl.uint8, 2: tl.uint16, 4: tl.int32}[nbytes]


@triton.jit
def _items(
    base, begin, offset, limit, flags, sizes, strides,
    k: tl.constexpr, part: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Return pointers to a part of word k of packets, and their mask."""
    at = offset + (4 * k + part * _step(ITEM))
    mask = at < limit
    if k >= 2:
        mask = mask & (flags == 0)
    place = begin + at
    if DIMS > 0:
        place = strided(place // ITEM, sizes, strides, DIMS) * ITEM + place % ITEM
    return (base + place).to(tl.pointer_type(_integer(_step(ITEM)))), mask


@triton.jit
def _pairs(
    base, begin, offset, limit, flags, sizes, strides, k: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Return pointers to words k and k + 1 of packets as one of 64 bits, and their mask.

    There are less than 2^31 elements; divisions of 32 bits take a fraction of the time.
    """
    at = offset + 4 * k
    mask = at < limit
    if k >= 2:
        mask = mask & (flags == 0)
    index = ((begin + at) // ITEM).to(tl.int32)
    place = (begin + at) % ITEM
    for d in tl.static_range(DIMS):
        size = sizes[DIMS - 1 - d].to(tl.int32)
        place += (index % size).to(tl.int64) * strides[DIMS - 1 - d] * ITEM
        index = index // size
    return (base + place).to(tl.pointer_type(tl.int64)), mask


@triton.jit
def _halves(offset, limit, flags):
    """Return which halves of packets hold data (int32)."""
    return (offset < limit).to(tl.int32), ((offset + 8 < limit) & (flags == 0)).to(tl.int32)


@triton.jit
def load_data(
    base, begin, offset, limit, flags, sizes, strides,
    ENC: tl.constexpr, WHOLE: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Load the data of packets; 2 or 4 blocks of words, 0 beyond the limit.

    Args:
        base: address of the tensor (int64).
        begin: byte at which the part begins that the packets carry (int64).
        offset, flags: from `iris_triton.collectives.packets.packet.spot`.
        limit: bytes of the part (int64).
        sizes, strides: of the tensor, DIMS of them, in elements; 0 if it is dense.
        WHOLE: whether everything is aligned (`packets.alignment`), and the tensor dense or made of runs of vectors.
        ENC, ITEM: the encoding; bytes of an element.
    """
    if WHOLE and DIMS > 0:
        words = ()
        for half in tl.static_range(data_words(ENC) // 2):
            pointer, mask = _pairs(base, begin, offset, limit, flags, sizes, strides, 2 * half, ITEM, DIMS)
            pair = tl.load(pointer, mask=mask, other=0)
            words = words + (pair.to(tl.int32), (pair >> 32).to(tl.int32))  # noqa: RUF005 - the compiler knows no star
        return words
    elif WHOLE and is_cuda():
        first, second = _halves(offset, limit, flags)
        words = run_assembly(load_assembly(ENC), (base + begin + offset, first, second), 4, 1, 2)
        return words if data_words(ENC) == 4 else (words[0], words[1])
    else:
        words = ()
        for k in tl.static_range(data_words(ENC)):
            word = flags * 0
            for part in tl.static_range(4 // _step(ITEM)):
                pointer, mask = _items(base, begin, offset, limit, flags, sizes, strides, k, part, ITEM, DIMS)
                word = word | (tl.load(pointer, mask=mask, other=0).to(tl.int32) << (8 * part * _step(ITEM)))
            words = words + (word,)  # noqa: RUF005 - the compiler knows no star
        return words


@triton.jit
def store_data(
    base, begin, offset, limit, flags, sizes, strides, words,
    ENC: tl.constexpr, WHOLE: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Store the data of packets; as `load_data`."""
    if WHOLE and DIMS > 0:
        for half in tl.static_range(data_words(ENC) // 2):
            pointer, mask = _pairs(base, begin, offset, limit, flags, sizes, strides, 2 * half, ITEM, DIMS)
            low, high = words[2 * half].to(tl.int64) & 0xFFFFFFFF, words[2 * half + 1].to(tl.int64) << 32
            tl.store(pointer, low | high, mask=mask)
    elif WHOLE and is_cuda():
        first, second = _halves(offset, limit, flags)
        last: tl.constexpr = data_words(ENC) - 2
        operands = base + begin + offset, words[0], words[1], words[last], words[last + 1], first, second
        run_assembly(store_assembly(ENC), operands, 1, 1, 6)
    else:
        for k in tl.static_range(data_words(ENC)):
            for part in tl.static_range(4 // _step(ITEM)):
                pointer, mask = _items(base, begin, offset, limit, flags, sizes, strides, k, part, ITEM, DIMS)
                value = words[k] >> (8 * part * _step(ITEM))
                tl.store(pointer, value.to(_integer(_step(ITEM))), mask=mask)


@triton.jit
def limit_of(total, part, member, EVEN: tl.constexpr):
    """Bytes of a member's part, where parts are equal but the last ones may be short; EVEN: none is."""
    return part if EVEN else tl.maximum(tl.minimum(total - member * part, part), 0)
