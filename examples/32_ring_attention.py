"""Ring attention: a sequence is divided among the ranks; keys and values travel round the ring during the computation.

Each rank has the queries, keys and values of its part of the sequence.  In each step `ctx.ops.ring_attention` attends
to one block of keys and values, its own at first, while it already passes that block on to the next rank.

With `causal`, a query sees the keys before it.  Ranks with consecutive tokens then have unequal work: the last rank
needs all blocks, the first one only its own.  With `striped`, rank r has the tokens r, r + ranks, r + 2 ranks, ...,
and all have about the same.

Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023.  Brandon et al.:
Striped Attention, 2023.

    python examples/32_ring_attention.py [ranks]
"""

import sys

import torch
from example_tools import on_gpu, timing

import iris_core


def reference(q, k, v, causal):
    """The whole sequence in float64."""
    scores = q.double() @ k.double().mT * q.shape[2] ** -0.5
    if causal:
        after = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(after, float("-inf"))
    return scores.softmax(dim=2) @ v.double()


def main(length=None, heads=2, head_dim=32):
    """Attention over one sequence in all forms, one launch behind the other."""
    forms = {"full": (False, False), "causal": (True, False), "striped": (True, True)}
    with iris_core.Iris(heap_size="256MiB") as ctx:
        if length is None:
            length = 150
            if on_gpu(ctx):
                length, heads, head_dim = 8190, 4, 128
        generator = torch.Generator().manual_seed(32)  # the same numbers on all ranks
        shape = heads, length, head_dim
        worst, times = 0.0, []
        for form, (causal, striped) in forms.items():
            attend = ctx.ops.ring_attention(
                heads, heads, length, head_dim, dtype=torch.float16, causal=causal, striped=striped
            )
            whole = [torch.randn(shape, generator=generator).half().to(ctx.device) for _ in range(3)]
            parts = [attend.part(x) for x in whole]
            out, _ = attend(*parts)
            expected = reference(*whole, causal)
            mine = attend.part(torch.ones_like(expected)) > 0  # without what was filled up
            errors = (out.double() - attend.part(expected))[mine].abs()
            if errors.numel():  # with more ranks than tokens, some have none
                assert errors.max() < 4e-3, f"{form}: the largest error is {errors.max()}"  # float16 has 11 bits
                worst = max(worst, errors.max().item())
            flops = 4 * heads * head_dim * length * attend.rows / (2 if causal else 1)
            times.append(timing(ctx, lambda: attend(*parts), flops=flops))  # noqa: B023 - called now
        ctx.barrier()
        results = ", ".join(form + time.replace(";", ":") for form, time in zip(forms, times, strict=True))
        return f"rank {ctx.cur_rank} of {ctx.num_ranks} on {ctx.device}: error {worst:.1e}; {results}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
