"""Rank jobs of tests/ops; they run on CPU ranks and on GPUs."""

import itertools
import math

import torch
from jobs_ccl import on_heap, run_cases  # noqa: F401 - a job of tests that name this module
from ops_cases import UNTOUCHED, operand, wrong_elements

from iris_core.ops import FusedConfig


class Tensors:
    """Tensors of a rank where a case wants them; made in the same order on every rank."""

    def __init__(self, ctx, case, rank, size):
        self.case, self.rank, self.size, self._ctx = case, rank, size, ctx
        shapes = case.shapes(size)
        dtype, out_dtype = (getattr(torch, name) for name in (case.dtype, case.out_dtype or case.dtype))
        places = ("heap", "transposed") if case.place == "inner" else (case.place, case.place)
        self.a, self.b = (self._make(place, shape, dtype) for place, shape in zip(places, shapes[:2], strict=True))
        self.out = self._make(case.out_place, shapes[2], out_dtype)
        bias = case.bias_shape(size)
        self.bias = None if bias is None else torch.empty(bias, dtype=out_dtype, device=ctx.device)
        scales = [case.scale_shape(size, which) for which in range(2)] if case.scales else []
        self.scales = [self._scales(shape, case.place in ("gaps", "inner")) for shape in scales]

    @property
    def operands(self):
        return self.a, self.b, self.bias, *self.scales

    def _scales(self, shape, strided):
        """Scales, one behind the other, or with others between them, or by columns."""
        if strided and len(shape) == 2 and shape[1] > 1:
            return torch.empty(shape[::-1], device=self._ctx.device).t()
        return torch.empty((*shape, 2) if strided else shape, device=self._ctx.device)[..., 0 if strided else ...]

    def _make(self, place, shape, dtype):
        (rows, columns), first = shape, 3 if place == "skewed" else 0
        width = 2 * math.ceil(columns / 16) * 16 if place == "gaps" else columns
        make = self._ctx.empty if place != "ordinary" else torch.empty
        nbytes = (first + rows * width) * dtype.itemsize
        flat = make(nbytes, dtype=torch.uint8, device=self._ctx.device).view(dtype)[first:]
        if place == "transposed":
            return flat.view(columns, rows).t()
        return flat.view(rows, width)[:, :columns]

    def fill(self, turn):
        """New data in the operands, something else in the output; returns the turn."""
        for which, tensor in enumerate(self.operands):
            if tensor is not None:
                tensor.copy_(operand(self.case, self.rank, self.size, which, turn))
        self.out.fill_(UNTOUCHED)
        return turn


def call(ctx, case, tensors, group=None, _members=None, async_op=False, workspace=None):
    config = FusedConfig(**{"algorithm": case.algorithm, **case.config}) if case.config or case.algorithm else None
    kwargs = {"group": group, "async_op": async_op, "config": config, "workspace": workspace}
    if case.dim is not None:
        kwargs["gather_dim"] = case.dim
    if case.op == "matmul_reduce_scatter":
        kwargs["layout"] = case.layout
    if case.scales:
        kwargs["a_scales"], kwargs["b_scales"] = tensors.scales
    return getattr(ctx.ops, case.op)(tensors.out, tensors.a, tensors.b, tensors.bias, **kwargs)


def verify(case, tensors, turn=0, what=""):
    """What is wrong with the output, or with what should not have changed; an empty list if nothing is."""
    rank, size = tensors.rank, tensors.size
    got = tensors.out.cpu().double()
    wrong = [f"{case}{what}: {text}" for text in wrong_elements(case, got, rank, size, turn, tensors.out.is_cuda)]
    for which, tensor in enumerate(tensors.operands):
        if tensor is not None:
            was = operand(case, rank, size, which, turn)
            if not torch.equal(tensor.cpu().contiguous().view(torch.uint8), was.contiguous().view(torch.uint8)):
                wrong.append(f"{case}{what}: operand {which} of rank {rank} was changed")
    return wrong


@on_heap("8MiB")
def float32_errors(ctx, algorithms):
    """Largest relative errors of products of float32, by what the config says, and algorithm."""
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((48, 64), (64, 32)))
    want, errors = ctx.num_ranks * (a.double() @ b.double()), {}
    mine, out = (a.to(ctx.device), b.to(ctx.device)), ctx.zeros(48, 32)
    for wish, name in itertools.product((None, True, False), algorithms):
        ctx.ops.matmul_all_reduce(out, *mine, config=FusedConfig(algorithm=name, allow_tf32=wish))
        errors[wish, name] = float((out.cpu().double() - want).abs().max() / want.abs().max())
    return errors
