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
from iris_core.errors import IrisError
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
        return stream, torch.nn.functional.rms_norm(stream, stream.shape[-1:], weight.double(), EPS)

    @property
    def given(self):
        return self.out, self.residual, self.x, self.weight, EPS


def tolerance(case):
    """Of a row's largest element: what rounding once makes."""
    return {"": {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[case.dtype],
            "float8_e4m3fn": 2**-4 + 2**-8, "float8_e5m2": 2**-3 + 2**-8}[case.out]  # fmt: skip


def call(ctx, case, tensors, group=None, _members=None, async_op=False):
    """Call the operation."""
    programs = {"comm_sms": case.programs} if case.programs else {}
    config = Config(algorithm=case.algorithm, **programs) if case.algorithm or programs else None
    how = {"scales": tensors.scales, "config": config, "group": group}
    return ctx.ops.all_reduce_rms_norm(*tensors.given, **how, async_op=async_op)


def verify(case, tensors, wanted, what=""):
    """What is wrong with the results."""
    wrong, (stream, norm) = [], wanted
    if not torch.equal(tensors.residual.cpu().double(), stream):
        wrong.append((case, what, "residual"))
    if not torch.equal(tensors.x.cpu().double(), tensors.parts[tensors.rank].double()):
        wrong.append((case, what, "x was changed"))
    got = tensors.out.cpu().double()
    most = norm.abs().amax(-1, keepdim=True)
    if case.out:
        largest = torch.finfo(getattr(torch, case.out)).max
        scales = tensors.scales.cpu().double()[..., None]
        if not torch.allclose(scales, most / largest, rtol=1e-5, atol=0):
            wrong.append((case, what, "scales"))
        got = got * scales
    error = ((got - norm).abs() / most.clamp(min=1e-30)).max().item() if norm.numel() else 0.0
    if not error <= tolerance(case):
        wrong.append((case, what, error))
    return wrong


run_cases = functools.partial(jobs_ccl.run_cases, packets=True, handles=True)
"""What is wrong with calls, which other modules make by this name."""


def same_bits(device):
    """Whether all algorithms have the same bits, on data that is no whole numbers; results on GPUs nearly so."""
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
    close = torch.allclose(one[1].float(), unfused[1].float(), rtol=2**-7, atol=1e-3)
    # on GPUs a row's squares are added up in an order that depends on the number of warps
    equal = torch.equal if device == "cpu" else lambda a, b: torch.allclose(a.float(), b.float(), rtol=2**-7, atol=0)
    same = [each for other in others for each in (torch.equal(one[0], other[0]), equal(one[1], other[1]))]
    return [torch.equal(one[0], wanted), *same, close, torch.equal(one[0], unfused[0])]


def layers(device):
    """The largest relative deviations of a layer's results and gradients from those of torch in float64."""
    with Iris("16MiB", device=device) as ctx:
        drawn, worst = torch.Generator().manual_seed(5), {}
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
            worst[name] = ((got.detach().cpu().double() - want).abs().max() / want.abs().max()).item()
        kept = torch.equal(residual.detach().cpu(), before)
        with torch.no_grad():
            kept = kept and not layer(x, residual)[0].requires_grad
        ctx.barrier()
    return worst, kept, repr(layer)


def measured(cache):
    """What is wrong with a first call, which measures and so runs often, and why which algorithm serves, also later."""
    said = []
    for _ in range(2):  # the second context reads what the first one has written
        with environment(IRIS_TUNE="first", IRIS_CACHE_DIR=cache), Iris("16MiB", device="cpu") as ctx:
            tensors = Tensors(ctx, Case("", (5, 64), "float32"), ctx.cur_rank, ctx.num_ranks)
            wanted = tensors.fill(0)
            call(ctx, tensors.case, tensors)
            said.append((verify(tensors.case, tensors, wanted), ctx.ops.explain(Case.op, *tensors.given).why))
            ctx.barrier()
    return said


def refused():
    """What is wrong with what is refused."""
    with Iris("16MiB", device="cpu") as ctx:
        x, residual, out, weight = torch.ones(3, 8), torch.ones(3, 8), torch.empty(3, 8), torch.ones(8)
        fp8, call = torch.empty(3, 8, dtype=torch.float8_e4m3fn), ctx.ops.all_reduce_rms_norm
        kept, one = residual.clone(), ctx.cur_rank
        wrong = unlike(
            (r"LayoutError: .*the x, of shape \(3, 8\), must be contiguous",
             lambda: call(out, residual, torch.ones(3, 16)[:, :8], weight)),
            (r"ArgumentError: .*weight must be \(8,\), float32, contiguous, not \(3,\)",
             lambda: call(out, residual, x, torch.ones(3))),
            ("ArgumentError: .*residual must be .*float32, contiguous, not .*, float16",
             lambda: call(out, residual.half(), x, weight)),
            ("ArgumentError: .*output must be .*, float32 or float8_e4m3fn or .*, not .*, float16",
             lambda: call(out.half(), residual, x, weight)),
            ("ArgumentError: .*takes scales", lambda: call(fp8, residual, x, weight)),
            ("ArgumentError: .*takes scales", lambda: call(out, residual, x, weight, scales=torch.empty(3))),
            (r"ArgumentError: .*scales must be \(3,\), float32, contiguous, not \(8,\), float32",
             lambda: call(fp8, residual, x, weight, scales=torch.empty(8))),
            ("ArgumentError: .*the output and x share memory", lambda: call(x, residual, x, weight)),
            ("ArgumentError: .*eps must be", lambda: call(out, residual, x, weight, -1.0)),
            ("UnsupportedError: .*float64 is not normalised",
             lambda: call(*(each.double() for each in (out, residual, x)), weight)),
            ("ArgumentError: .*gradient", lambda: call(out, residual.clone().requires_grad_(), x, weight)),
            ("RankMismatchError: .*eps", lambda: call(out, residual, x, weight, eps=1e-3 if one else 1e-5)),
            ("UnsupportedError: .*no use for num_stages",
             lambda: call(out, residual, x, weight, config=Config(algorithm="one_shot", num_stages=2))),
            ("ArgumentError: .*there is no algorithm 'none'",
             lambda: call(out, residual, x, weight, config=Config(algorithm="none"))),
            ("RankMismatchError: .*rows", lambda: call(*(each[one:] for each in (out, residual, x)), weight)),
            ("ArgumentError: .*neither async_op",
             lambda: ctx.ops.bind(Case.op, out, residual, x, weight, async_op=True)),
            ("", lambda: call(*(each[:0] for each in (out, residual, x)), weight)),
        )  # fmt: skip
    assert torch.equal(kept, residual)
    return wrong


def called_differently(algorithm):
    """What ranks hear that call with another eps, both of which they know; at the latest two calls later."""
    with emulation(), Iris("16MiB", device="cpu") as ctx:
        out, residual, x, weight = torch.empty(3, 8), torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)

        def call(eps):
            ctx.ops.all_reduce_rms_norm(out, residual, x, weight, eps, config=Config(algorithm=algorithm))

        both = 1e-3, 1e-5
        for eps in (*both, *both):
            call(eps)
        call(both[ctx.cur_rank])
        for _ in range(2):
            ctx.broadcast(0)  # unlike a barrier, it looks at no reports
            try:
                call(1e-3)
            except IrisError as error:
                return type(error).__name__, str(error)
    return "nothing", ""
