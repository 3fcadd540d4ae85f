"""Rank jobs of the tests of examples 31 and 32: their operations, called again and again, with no wait in between."""

import pathlib
import random
import time

import jobs_examples
import torch

from iris_core import Iris

MOST_CYCLES = 200_000
"""For which a GPU rests before a call at most: longer than a call takes."""


def in_a_row(path, calls, device):
    """Call an example's operation with changing data, each rank at its own pace; returns the largest error.

    No rank's host waits for another one or for its device.  On GPUs the calls behind the first are a graph's.

    Args:
        path: of the example.
        calls: how many.
        device: where.
    """
    example = jobs_examples.load(path)
    with Iris(heap_size="16MiB", device=device) as ctx:
        generator = torch.Generator().manual_seed(7)  # the same numbers on all ranks
        operation, make = PREPARE[pathlib.Path(path).name](ctx, example, generator)
        made = [make() for _ in range(calls)]
        inputs = [[x.to(ctx.device) for x in tensors] for tensors, _ in made]
        ctx.barrier()
        outs, pace = [], random.Random(ctx.cur_rank)
        call = operation
        for tensors in inputs:
            if pace.random() < 0.5:
                _rest(device, pace.random())
            outs.append(call(*tensors).clone())
            if call is operation:
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


def _flash_decode(ctx, example, generator):
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


def _ring_attention(ctx, example, generator):
    heads, length, head_dim = 2, 45, 16
    attention = ctx.ops.ring_attention(heads, heads, length, head_dim, dtype=torch.float16)

    def make():
        q, k, v = (torch.randn(heads, length, head_dim, generator=generator).half() for _ in range(3))
        want = attention.part(example.reference(q, k, v, False))
        want[attention.part(torch.ones(heads, length, head_dim)) == 0] = float("nan")  # beyond the sequence
        return [attention.part(x) for x in (q, k, v)], want

    return lambda *parts: attention(*parts)[0], make


PREPARE = {
    "31_flash_decode.py": _flash_decode,
    "32_ring_attention.py": _ring_attention,
}
"""Makes the operation, and a function that makes the inputs of a call and what it gives; NaN stands for anything."""
