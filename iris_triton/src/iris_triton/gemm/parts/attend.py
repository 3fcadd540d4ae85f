"""Attention to some keys, as what was found so far: largest scores, sums of weights, and weighted values."""

import triton
import triton.language as tl

_CPU_PROGRAMS = 6


def programs_at_once(space):
    """How many programs certainly run at the same time: those that wait for each other must."""
    return space.units if space.members.is_cuda else _CPU_PROGRAMS


@triton.constexpr_function
def width_of(head_dim):
    """Return the columns of a tile of heads: a power of two, at least 16, as `tl.arange` and `tl.dot` want."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def within(rows, d, HEAD_DIM: tl.constexpr):
    """Return a mask without the columns d from HEAD_DIM on: where there are none, the one of the rows as it is."""
    return rows if width_of(HEAD_DIM) == HEAD_DIM else rows & (d < HEAD_DIM)[None, :]


@triton.jit
def attend(
    q, k, v, largest, total, acc, first, last, k_stride, v_stride, q_place, k_place, stride, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Attend to keys first ... last - 1, and add them to what was found (online softmax).

    Args:
        q: a block of queries, 0 in the columns from HEAD_DIM on.
        k, v: pointers to key 0 and its value; the next ones follow at k_stride and v_stride.
        largest, total, acc: what was found, in float32.
        q_place, k_place, stride: with CAUSAL, the queries' places in the sequence, that of key 0, and to the next one.
    """
    d = tl.arange(0, width_of(HEAD_DIM))
    for start in range(first, last, BLOCK_KEYS):
        n = start + tl.arange(0, BLOCK_KEYS)
        row, seen = n.to(tl.int64)[:, None], n[None, :] < last
        there = within(row < last, d, HEAD_DIM)
        keys = tl.load(k + row * k_stride + d[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if CAUSAL:
            seen &= (k_place + n * stride)[None, :] <= q_place[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: all weights are exp(-inf)
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        values = tl.load(v + row * v_stride + d[None, :], mask=there, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        largest = higher
    return largest, total, acc
