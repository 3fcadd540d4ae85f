"""Flash decode over ranks: a new token of each sequence attends to keys and values that are spread over all ranks.

The cache is divided among the ranks by pages.  Each rank attends to its part, and `ctx.ops.flash_decode` adds the
partial results up, the same bits on all ranks.  Query heads share key heads in groups (GQA).  A sequence may have any
length, on each rank another one, also none.

Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023.

    python examples/31_flash_decode.py [ranks]
"""

import sys

import torch
from example_tools import on_gpu, timing

import iris_core

PAGE = 16


def reference(q, keys, values):
    """One sequence in float64: q (heads, head_dim), keys and values (kv_heads, length, head_dim)."""
    grouped = q.double().view(keys.shape[0], -1, q.shape[1])
    scores = grouped @ keys.double().mT * q.shape[1] ** -0.5
    return (scores.softmax(dim=2) @ values.double()).view(q.shape)  # without any key: zeros


def main(lengths=None, heads=8, kv_heads=2, head_dim=32, pieces=None, tokens=3):
    """Decode some tokens: each step appends one to every sequence.  `lengths`: keys at the beginning."""
    with iris_core.Iris(heap_size="256MiB") as ctx:
        if lengths is None:
            lengths = 200, 37, 5
            if on_gpu(ctx):
                lengths, heads, kv_heads, head_dim = (20_000, 3000, 777, 5), 32, 8, 128
        rank, world, batch, end = ctx.cur_rank, ctx.num_ranks, len(lengths), max(lengths) + tokens
        generator = torch.Generator().manual_seed(31)  # the same numbers on all ranks
        shape = batch, kv_heads, end, head_dim
        whole_k, whole_v = (torch.randn(shape, generator=generator).half().to(ctx.device) for _ in range(2))
        kept = [t for t in range(end) if t // PAGE % world == rank]  # pages are dealt to the ranks in turn
        k, v = (x[:, :, kept].contiguous() for x in (whole_k, whole_v))
        decode = ctx.ops.flash_decode(batch, heads, kv_heads, head_dim, dtype=torch.float16, pieces=pieces)
        worst = 0.0
        for token in range(tokens):
            now = [length + token for length in lengths]
            mine = torch.tensor([sum(t < n for t in kept) for n in now], dtype=torch.int32, device=ctx.device)
            q = torch.randn(batch, heads, head_dim, generator=generator).half().to(ctx.device)
            out = decode(q, k, v, mine)
            for b, n in enumerate(now):
                expected = reference(q[b], whole_k[b, :, :n], whole_v[b, :, :n])
                error = (out[b].double() - expected).abs().max().item()
                assert error < 4e-3, f"sequence {b}: the largest error is {error}"  # float16 has 11 bits
                worst = max(worst, error)
            first = out.clone()
            ctx.ccl.broadcast(first, src=0)
            assert torch.equal(out.view(torch.int16), first.view(torch.int16)), "the ranks' results differ in bits"
        time = timing(ctx, lambda: decode(q, k, v, mine), nbytes=4 * int(mine.sum()) * kv_heads * head_dim)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: {tokens} tokens for {batch} sequences, error {worst:.1e}{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
