"""Rank jobs of the tests of examples 31 to 34: their operations, called again and again, with no wait in between."""

import contextlib
import pathlib
import random
import time

import delays
import jobs_examples
import torch

from iris_core import Iris

MOST_CYCLES = 200_000
"""For which a GPU rests before a call at most: longer than a call takes."""


def in_a_row(path, calls, device, again, share=0.0, shared_file=None):
    """Call an example's operation with changing data, each rank at its own pace; returns the largest error.

    No rank's host waits for another one or for its device.  `again`: with the same tensors, into which new data is
    copied; on GPUs the calls behind the first are a graph's.  `share` of the signals are late, on CPU ranks.
    """
    example = jobs_examples.load(path)
    with Iris(heap_size="16MiB", device=device) as ctx:
        generator = torch.Generator().manual_seed(7)  # the same numbers on all ranks
        operation, make = PREPARE[pathlib.Path(path).name](ctx, example, generator, again)
        made = [make() for _ in range(calls)]
        inputs = [[x.to(ctx.device) for x in tensors] for tensors, _ in made]
        ctx.barrier()
        outs, pace = [], random.Random(ctx.cur_rank)
        call = operation
        late = delays.late_after_signals(shared_file, ctx.cur_rank, ctx.num_ranks, share)
        with late if share else contextlib.nullcontext():
            for tensors in inputs:
                if pace.random() < 0.5:
                    _rest(device, pace.random())
                outs.append(call(*tensors).clone())
                if again and call is operation:
                    call = _Replay(operation, tensors, ctx.device)
        ctx.barrier()
        worst = 0.0
        for turn, (out, (_, want)) in enumerate(zip(outs, made, strict=True)):
            errors = (out.cpu().double() - want)[~want.isnan()].abs()
            if errors.numel():
                assert errors.max() < 8e-3, f"call {turn}: the largest error is {errors.max()}"  # NaN is none smaller
                worst = max(worst, errors.max().item())
        return worst


def _rest(device, share):
    """Let this rank's device do nothing for a share of the longest rest."""
    if torch.device(device).type == "cuda":
        torch.cuda._sleep(int(share * MOST_CYCLES))
    else:
        time.sleep(0.03 * share)


class _Replay:
    """Calls an operation with the same tensors; on GPUs as a graph that was captured once."""

    def __init__(self, operation, tensors, device):
        self._tensors = [x.clone() for x in tensors]
        self._graph = None
        if torch.device(device).type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = operation(*self._tensors)
        self._operation = operation

    def __call__(self, *tensors):
        for mine, new in zip(self._tensors, tensors, strict=True):
            mine.copy_(new)
        if self._graph is None:
            return self._operation(*self._tensors)
        self._graph.replay()
        return self._out


def _flash_decode(ctx, example, generator, again):
    # few signals: on the CPU, a delay at random then often keeps one peer waiting while another one goes on
    world, batch, heads, kv_heads, head_dim, capacity = ctx.num_ranks, 1, 2, 1, 16, 40
    decode = ctx.ops.flash_decode(batch, heads, kv_heads, head_dim, dtype=torch.float16, pieces=2)

    def make():
        lengths = torch.randint(0, capacity + 1, (world, batch), generator=generator, dtype=torch.int32)
        q = torch.randn(batch, heads, head_dim, generator=generator).half()
        shape = world, batch, kv_heads, capacity, head_dim
        k, v = (torch.randn(shape, generator=generator).half() for _ in range(2))
        want = []
        for b in range(batch):
            keys, values = (torch.cat([x[r, b, :, : lengths[r, b]] for r in range(world)], dim=1) for x in (k, v))
            want.append(example.reference(q[b], keys, values))
        rank = ctx.cur_rank
        return (q, k[rank], v[rank], lengths[rank]), torch.stack(want)

    return decode, make


def _ring_attention(ctx, example, generator, again):
    heads, length, head_dim = 2, 45, 16
    attention = ctx.ops.ring_attention(heads, heads, length, head_dim, dtype=torch.float16)

    def make():
        q, k, v = (torch.randn(heads, length, head_dim, generator=generator).half() for _ in range(3))
        want = attention.part(example.reference(q, k, v, False))
        want[attention.part(torch.ones(heads, length, head_dim)) == 0] = float("nan")  # beyond the sequence
        return [attention.part(x) for x in (q, k, v)], want

    return lambda *parts: attention(*parts)[0], make


def _moe(ctx, example, generator, again):
    world, local, hidden, ffn, tokens, top_k = ctx.num_ranks, 2, 16, 24, 20, 2
    shapes = (world * local, hidden, ffn), (world * local, ffn, hidden)
    w1, w2 = (torch.randn(shape, generator=generator).half() / 4 for shape in shapes)
    mine = slice(ctx.cur_rank * local, (ctx.cur_rank + 1) * local)
    layer = example.Experts(ctx, w1[mine].to(ctx.device), w2[mine].to(ctx.device), tokens, top_k)
    own = torch.Generator().manual_seed(ctx.cur_rank)

    def make():
        n = tokens if again else int(torch.randint(0, tokens + 1, (1,), generator=own))
        x = torch.randn(n, hidden, generator=own).half()
        chosen, weights = example.route(torch.randn(n, world * local, generator=own), top_k)
        return (x, chosen, weights), example.reference(x, chosen, weights, w1, w2)

    return layer, make


def _norm(ctx, example, generator, again):
    tokens, hidden = 21, 24
    operation = example.ReduceNormGather(ctx, tokens, hidden)
    stream = torch.zeros(tokens, hidden, dtype=torch.float64)

    def make():
        parts = torch.randn(ctx.num_ranks, tokens, hidden, generator=generator).half()
        weight = torch.rand(hidden, generator=generator)
        stream.add_(parts.double().sum(dim=0))
        want = torch.nn.functional.rms_norm(stream, (hidden,), weight.double(), operation.eps)
        return (parts[ctx.cur_rank], weight), want

    return operation, make


PREPARE = {
    "31_flash_decode.py": _flash_decode,
    "32_ring_attention.py": _ring_attention,
    "33_moe.py": _moe,
    "34_norm.py": _norm,
}
"""Makes the operation, and a function that makes the inputs of a call and what it gives; NaN stands for anything."""
