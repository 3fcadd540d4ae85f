"""Attention to some keys, as what was found so far: largest scores, sums of weights, and weighted values."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

import triton
import triton.language as tl

_CPU_PROGRAMS = 6


def programs_at_once(space):
    """How many programs certainly run at the same time: those that wait for each other must."""
    return space.units if space.members.is_cuda else _CPU_PROGRAMS


@triton.jit
def attend(
    q, k, v, largest, total, acc, first, last, k_stride, v_stride, q_place, k_place, stride, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Attend to keys first ... last - 1, and add them to what was found (online softmax).

    Args:
        q: a block of queries.
        k, v: pointers to key 0 and its value; the next ones follow at k_stride and v_stride.
        largest, total, acc: what was found, in float32.
        q_place, k_place, stride: with CAUSAL, the queries' places in the sequence, that of key 0, and to the next one.
    """
    d = tl.arange(0, HEAD_DIM)
    for start in range(first, last, BLOCK_KEYS):
        n = start + tl.arange(0, BLOCK_KEYS)
        row, seen = n.to(tl.int64)[:, None], n[None, :] < last
        keys = tl.load(k + row * k_stride + d[None, :], mask=row < last, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if CAUSAL:
            seen &= (k_place + n * stride)[None, :] <= q_place[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: all weights are exp(-inf)
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        values = tl.load(v + row * v_stride + d[None, :], mask=row < last, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        largest = higher
    return largest, total, acc
