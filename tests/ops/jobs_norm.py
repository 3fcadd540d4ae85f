"""Rank jobs of test_norm: all_reduce + residual + RMSNorm, against torch in float64."""

import copy
import functools
from dataclasses import dataclass

import jobs_ccl
import torch
from emulation import emulation
from jobs_common import environment, unlike

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.nn import RMSNorm

EPS = 1e-3
UNTOUCHED = 7


@dataclass(frozen=True)
class Case:
    """A call: `out` is an element type of 8-bit floats or empty, `programs` of the kernel, 0 for its own choice."""

    algorithm: str
    shape: tuple
    dtype: str = "bfloat16"
    out: str = ""
    weight: str = ""
    place: str = "ordinary"
    programs: int = 0
    eps: float = EPS
    op, jobs = "all_reduce_rms_norm", "jobs_norm"


class Tensors:
    """Tensors of a rank; `fill` makes new data: small whole numbers, whose sums are exact in every type."""

    def __init__(self, ctx, case, rank, size):
        self.case, self.rank, self.size = case, rank, size
        dtype, out = getattr(torch, case.dtype), getattr(torch, case.out or case.dtype)

        def make(dtype, make=torch.empty):
            count = torch.Size(case.shape).numel() + 1
            begin = int(case.place == "skewed")
            return make(count, dtype=dtype, device=ctx.device)[begin : begin + count - 1].view(case.shape)

        self.x = make(dtype, ctx.empty if case.place == "heap" else torch.empty)
        self.residual, self.out = make(dtype), make(out)
        self.weight = torch.empty(case.shape[-1], dtype=getattr(torch, case.weight or case.dtype), device=ctx.device)
        self.scales = torch.empty(case.shape[:-1], device=ctx.device) if case.out else None

    def fill(self, turn):
        drawn = torch.Generator().manual_seed(turn)
        self.parts = torch.randint(-3, 4, (self.size, *self.case.shape), generator=drawn)
        self.before = torch.randint(-3, 4, self.case.shape, generator=drawn)
        weight = torch.randint(1, 5, self.case.shape[-1:], generator=drawn) / 2
        self.x.copy_(self.parts[self.rank])
        self.residual.copy_(self.before)
        self.weight.copy_(weight)
        self.out.copy_(torch.full(self.case.shape, UNTOUCHED).float())
        stream = (self.parts.sum(0) + self.before).double()
        return stream, torch.nn.functional.rms_norm(stream, stream.shape[-1:], weight.double(), self.case.eps)

    @property
    def given(self):
        return self.out, self.residual, self.x, self.weight, self.case.eps


def tolerance(case):
    """Of a row's largest element: what rounding once makes."""
    return {"": {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[case.dtype],
            "float8_e4m3fn": 2**-4 + 2**-8, "float8_e5m2": 2**-3 + 2**-8}[case.out]  # fmt: skip


def call(ctx, case, tensors, group=None, _members=None, async_op=False):
    programs = {"comm_sms": case.programs} if case.programs else {}
    config = Config(algorithm=case.algorithm, **programs) if case.algorithm or programs else None
    how = {"scales": tensors.scales, "config": config, "group": group}
    return ctx.ops.all_reduce_rms_norm(*tensors.given, **how, async_op=async_op)


def verify(case, tensors, wanted, what=""):
    stream, norm = wanted
    got = tensors.out.cpu().double()
    most = norm.abs().amax(-1, keepdim=True)
    right = {
        "residual": torch.equal(tensors.residual.cpu().double(), stream),
        "x": torch.equal(tensors.x.cpu().double(), tensors.parts[tensors.rank].double()),
    }
    if case.out:
        scales = tensors.scales.cpu().double()[..., None]
        largest = torch.finfo(getattr(torch, case.out)).max
        right["scales"] = torch.allclose(scales, most / largest, rtol=1e-5, atol=0)
        got = got * scales
    error = ((got - norm).abs() / most.clamp(min=1e-30)).max().item() if norm.numel() else 0.0
    right[f"error {error}"] = error <= tolerance(case)
    return [(case, what, name) for name, holds in right.items() if not holds]


run_cases = functools.partial(jobs_ccl.run_cases, packets=True, handles=True)


def same_bits(device):
    """All algorithms have the same bits, on data that is no whole numbers; results on GPUs nearly so."""
    with emulation(), Iris("16MiB", device=device) as ctx:
        drawn = torch.Generator().manual_seed(3)
        parts, before = torch.randn(ctx.num_ranks, 9, 200, generator=drawn), torch.randn(9, 200, generator=drawn)
        weight, found = torch.rand(200, generator=drawn).to(ctx.device), []
        for algorithm in ("one_shot", "two_shot", "sentinel_one_shot", "sentinel_two_shot", "unfused"):
            x, residual = parts[ctx.cur_rank].bfloat16().to(ctx.device), before.bfloat16().to(ctx.device)
            out = torch.empty_like(x)
            ctx.ops.all_reduce_rms_norm(out, residual, x, weight, config=Config(algorithm=algorithm))
            found.append((residual.cpu(), out.cpu()))
        total = torch.empty_like(x)
        ctx.ccl.all_reduce(total, x)
        wanted = (total.float().cpu() + before.bfloat16().float()).bfloat16()
    one, *others, unfused = found
    assert torch.equal(one[0], wanted)
    assert torch.equal(one[0], unfused[0])
    assert torch.allclose(one[1].float(), unfused[1].float(), rtol=2**-7, atol=1e-3)
    # on GPUs a row's squares are added up in an order that depends on the number of warps
    equal = torch.equal if device == "cpu" else lambda a, b: torch.allclose(a.float(), b.float(), rtol=2**-7, atol=0)
    assert all(torch.equal(one[0], other[0]) and equal(one[1], other[1]) for other in others)


def layers(device):
    """Results and gradients of a layer are near those of torch in float64, and the residual stays as it is."""
    with Iris("16MiB", device=device) as ctx:
        drawn = torch.Generator().manual_seed(5)
        parts = torch.randn(ctx.num_ranks, 3, 4, 48, generator=drawn)
        before, target, other = torch.randn(3, 3, 4, 48, generator=drawn)
        weight = torch.rand(48, generator=drawn) + 0.5
        layer = copy.deepcopy(RMSNorm(ctx, 48, EPS))
        with torch.no_grad():
            layer.weight.copy_(weight)
        x, residual = (each.clone().to(ctx.device).requires_grad_() for each in (parts[ctx.cur_rank], before))
        out, stream = layer(x, residual)
        ((out - target.to(ctx.device)) ** 2 + stream * other.to(ctx.device)).sum().backward()
        wide = [each.double().requires_grad_() for each in (parts, before, weight)]
        total = wide[0].sum(0) + wide[1]
        wanted = torch.nn.functional.rms_norm(total, (48,), wide[2], EPS)
        ((wanted - target.double()) ** 2 + total * other.double()).sum().backward()
        pairs = {
            "out": (out, wanted), "residual": (stream, total), "gradient of x": (x.grad, wide[0].grad[ctx.cur_rank]),
            "gradient of the residual": (residual.grad, wide[1].grad),
            "gradient of the weight": (layer.weight.grad, wide[2].grad),
        }  # fmt: skip
        for name, (got, want) in pairs.items():
            assert (got.detach().cpu().double() - want).abs().max() < 1e-5 * want.abs().max(), name
        assert torch.equal(residual.detach().cpu(), before)
        with torch.no_grad():
            assert not layer(x, residual)[0].requires_grad
        assert repr(layer) == "RMSNorm(48, eps=0.001)"
        ctx.barrier()


def measured(cache):
    """A first call, which measures and so runs often, leaves the residual as one call makes it, also later."""
    for why in ("measured here as the fastest", f"measured as the fastest in {cache}"):  # what the first has written
        with environment(IRIS_TUNE="first", IRIS_CACHE_DIR=cache), Iris("16MiB", device="cpu") as ctx:
            tensors = Tensors(ctx, Case("", (5, 64), "float32"), ctx.cur_rank, ctx.num_ranks)
            wanted = tensors.fill(0)
            call(ctx, tensors.case, tensors)
            assert verify(tensors.case, tensors, wanted) == []
            assert ctx.ops.explain(Case.op, *tensors.given).why.startswith(why)
            ctx.barrier()


def refused():
    """What no algorithm takes is refused, and leaves the residual as it is."""
    with Iris("16MiB", device="cpu") as ctx:
        x, residual, out, weight = torch.ones(3, 8), torch.ones(3, 8), torch.empty(3, 8), torch.ones(8)
        fp8, call = torch.empty(3, 8, dtype=torch.float8_e4m3fn), ctx.ops.all_reduce_rms_norm
        kept, one = residual.clone(), ctx.cur_rank
        wrong = unlike(
            ("LayoutError: .*contiguous", lambda: call(out, residual, torch.ones(3, 16)[:, :8], weight)),
            (r"ArgumentError: .*weight.*not \(3,\)", lambda: call(out, residual, x, torch.ones(3))),
            ("ArgumentError: must be: residual", lambda: call(out, residual.half(), x, weight)),
            ("ArgumentError: must be: output", lambda: call(out.half(), residual, x, weight)),
            ("ArgumentError: products.takes scales", lambda: call(fp8, residual, x, weight)),
            ("ArgumentError: products.takes scales", lambda: call(out, residual, x, weight, scales=torch.empty(3))),
            ("ArgumentError: must be: scales", lambda: call(fp8, residual, x, weight, scales=torch.empty(8))),
            ("ArgumentError: share", lambda: call(x, residual, x, weight)),
            ("ArgumentError: .*eps", lambda: call(out, residual, x, weight, -1.0)),
            ("UnsupportedError: .*float64", lambda: call(*(each.double() for each in (out, residual, x)), weight)),
            ("ArgumentError: .*gradient", lambda: call(out, residual.clone().requires_grad_(), x, weight)),
            ("RankMismatchError: .*eps", lambda: call(out, residual, x, weight, eps=1e-3 if one else 1e-5)),
            ("UnsupportedError: .*num_stages",
             lambda: call(out, residual, x, weight, config=Config(algorithm="one_shot", num_stages=2))),
            ("ArgumentError: .*'none'", lambda: call(out, residual, x, weight, config=Config(algorithm="none"))),
            ("RankMismatchError: .*rows", lambda: call(*(each[one:] for each in (out, residual, x)), weight)),
            ("ArgumentError: .*async_op", lambda: ctx.ops.bind(Case.op, out, residual, x, weight, async_op=True)),
            ("", lambda: call(*(each[:0] for each in (out, residual, x)), weight)),
        )  # fmt: skip
    assert wrong == []
    assert torch.equal(kept, residual)
