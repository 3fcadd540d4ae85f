"""Reductions, scans, shapes, products, random numbers, mathematical functions, descriptors, atomics: against torch."""

import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_text import check, kernel_of
from tables import raises, table
from triton.tools.tensor_descriptor import TensorDescriptor

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
I32 = torch.int32


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@table("dtype", [torch.float32, torch.bfloat16, torch.float16, I32, torch.int8, torch.uint8])
def test_reductions(dtype):
    x = randn(16, 32) * 20
    x = (x.abs() if dtype is torch.uint8 else x).to(dtype)
    wide = torch.float32 if dtype.is_floating_point else I32
    # 16-bit floats are summed in their own precision, as on GPUs.
    atol = {torch.float16: 0.3, torch.bfloat16: 2.0}.get(dtype, 1e-4)
    for axis in (0, 1):
        sums, how = x.to(wide).sum(axis).to(wide), {"atol": atol, "rtol": 1e-2 if atol > 0.1 else 1e-6}
        check(f"tl.sum(v, axis={axis}).to(out.dtype.element_ty)", sums, v=x, **how)
        check(f"tl.max(v, axis={axis})", x.amax(axis), v=x)
        check(f"tl.min(v, axis={axis})", x.amin(axis), v=x)
        # The first of equal maxima wins.
        check(f"tl.argmax(v, axis={axis})", (x == x.amax(axis, keepdim=True)).int().argmax(axis).int(), v=x)


affine = kernel_of(triton.jit, "a1, b1, a2, b2", "return a1 * a2, b1 * a2 + b2")
product = kernel_of(triton.jit, "a, b", "return a * b")


larger = kernel_of(triton.jit, "a, b", "if a > b:\n    r = a\nelse:\n    r = b\nreturn r")


def test_own_combine_functions_keep_the_order():
    a, b = randn(8), randn(8, seed=1)
    running = [(a[0], b[0])]
    for x, y in zip(a[1:], b[1:], strict=True):
        running.append((running[-1][0] * x, running[-1][1] * x + y))
    for number, scanned in enumerate(map(torch.stack, zip(*running, strict=True))):
        how = {"a": a, "b": b, "affine": affine, "atol": 1e-5, "rtol": 1.3e-6}
        check(f"tl.reduce((a, b), 0, affine)[{number}]", scanned[-1], **how)
        check(f"tl.associative_scan((a, b), 0, affine)[{number}]", scanned, **how)
    backwards, how = a.flip(0).cumprod(0).flip(0), {"atol": 1e-5, "rtol": 1.3e-6}
    check("tl.associative_scan(a, 0, product, reverse=True)", backwards, a=a, product=product, **how)
    check("tl.reduce(a, 0, larger)", a.max(), a=a, larger=larger)
    check("tl.associative_scan(a, 0, larger)", a.cummax(0).values, a=a, larger=larger)
    check("tl.map_elementwise(larger, a, 0.5)", a.clamp(min=0.5), a=a, larger=larger)


@table("dtype, result, tolerance", [
    (torch.float32, torch.float32, 1e-4), (torch.float16, torch.float32, 1e-4), (torch.float16, torch.float16, 2e-2),
    (torch.bfloat16, torch.float32, 1e-4), (torch.float64, torch.float64, 1e-10), (torch.int8, I32, 0),
    (torch.float8_e4m3fn, torch.float32, 1e-4), (torch.float8_e5m2, torch.float32, 1e-4),
])  # fmt: skip
def test_dot(dtype, result, tolerance):
    scale = 40 if dtype is torch.int8 else 1
    a, b = (randn(16, 32) * scale).to(dtype), (randn(32, 16, seed=1) * scale).to(dtype)
    c = (randn(16, 16, seed=2) * 4).to(result)
    expected = (a.double() @ b.double() + c.double()).to(result)
    check("tl.dot(a, b, c, out_dtype=c.dtype)", expected, a=a, b=b, c=c, atol=tolerance, rtol=tolerance)


LIBDEVICE = "tl.extra.libdevice"
NAN_ROWS = torch.tensor([1, 1, 1, float("nan"), 7, 1, 1, 1]).repeat(4, 1)
POSITIVE = (randn(32).abs() + 0.1).clamp(max=3)
COUNTED = torch.randint(-2, 12, (64,), generator=torch.Generator().manual_seed(0), dtype=I32)
X, Y, MATRIX = torch.arange(16.0).roll(5), torch.arange(16.0).roll(3) - 20, randn(4, 8)


@table("given, expression, expected", [
    ((NAN_ROWS,), "tl.max(a, axis=1)", lambda x: torch.full((4,), 7.0)),  # as on GPUs
    ((NAN_ROWS,), "tl.min(a, axis=1)", lambda x: torch.ones(4)),
    ((MATRIX,), "tl.cumsum(a, axis=1)", lambda x: x.cumsum(1)),
    ((MATRIX,), "tl.cumsum(a, axis=0, reverse=True)", lambda x: x.flip(0).cumsum(0).flip(0)),
    ((MATRIX,), "tl.cumprod(a, axis=1)", lambda x: x.cumprod(1)),
    *(((COUNTED,), f"tl.histogram(a, 8, mask={mask})",  # which drops what is out of range
       lambda x, end=end: torch.tensor([int((x[:end] == b).sum()) for b in range(8)]).int())
      for mask, end in ((None, 64), ("tl.arange(0, 64) < 32", 32))),
    ((X, Y), "tl.split(tl.join(a, b))[0]", lambda x, y: x),
    ((X, Y), "tl.split(tl.join(a, b))[1]", lambda x, y: y),
    ((X,), "tl.ravel(tl.trans(tl.reshape(a, [4, 4])))", lambda x: x.view(4, 4).T.flatten()),
    ((X,), "tl.reshape(tl.permute(tl.reshape(a, [4, 4]), (1, 0)), [16])", lambda x: x.view(4, 4).T.flatten()),
    ((X,), "tl.gather(a, 15 - tl.arange(0, 16), axis=0)", lambda x: x.flip(0)),
    ((X,), "tl.sort(a)", lambda x: x.sort().values),
    ((X,), "tl.sort(a, descending=True)", lambda x: x.sort(descending=True).values),
    ((X,), "tl.flip(a, 0)", lambda x: x.flip(0)),
    ((X,), "tl.full([16], 3.5, tl.float32) + tl.zeros([16], tl.float32) + tl.zeros_like(a)", lambda x: x * 0 + 3.5),
    ((X, Y), "tl.split(tl.join(tl.sum(a), tl.sum(b)))[1] * tl.full([16], 1.0, tl.float32)",
     lambda x, y: y.sum().expand(16)),
    ((X,), "tl.broadcast_to(tl.expand_dims(a, 0), [2, 16])", lambda x: torch.stack([x, x])),
    ((X, Y), "tl.interleave(a, b)", lambda x, y: torch.stack([x, y], 1).view(32)),
    ((X, Y), "tl.cat(a, b, can_reorder=True)", lambda x, y: torch.cat([x, y])),
    *(((POSITIVE,), *row) for row in (
        ("tl.exp(a) + tl.exp2(a)", lambda x: x.exp() + x.exp2()),
        ("tl.log(a) + tl.log2(a)", lambda x: x.log() + x.log2()),
        ("tl.sin(a) + tl.cos(a)", lambda x: x.sin() + x.cos()),
        ("tl.erf(a) + tl.abs(-a)", lambda x: x.erf() + x),
        ("tl.sqrt(a) + tl.rsqrt(a) + tl.sqrt_rn(a)", lambda x: x.sqrt() + x.rsqrt() + x.sqrt()),
        ("tl.floor(a) + tl.ceil(a)", lambda x: x.floor() + x.ceil()),
        ("tl.fma(a, a, a) + tl.div_rn(a, a + 1)", lambda x: x * x + x + x / (x + 1)),
        ("tl.sigmoid(a) + tl.clamp(a, 0.5, 1.0)", lambda x: x.sigmoid() + x.clamp(0.5, 1.0)),
        ("tl.softmax(a)", lambda x: x.softmax(0)),
        (f"{LIBDEVICE}.tanh(a) + {LIBDEVICE}.erf(a) + {LIBDEVICE}.erfinv(a / 4)",
         lambda x: x.tanh() + x.erf() + (x / 4).erfinv()),
        (f"{LIBDEVICE}.pow(a, 2.0) + {LIBDEVICE}.atan2(a, 1.0) + {LIBDEVICE}.fast_expf(a)",
         lambda x: x**2 + torch.atan2(x, torch.ones(32)) + x.exp()),
        (f"{LIBDEVICE}.isnan(a).to(tl.float32) + {LIBDEVICE}.rint(a * 3) + {LIBDEVICE}.rsqrt(a * a + 1)",
         lambda x: (x * 3).round() + (x * x + 1).rsqrt()),
        ("tl.extra.cuda.libdevice.fmod(-a * 7, 2.0) + tl.extra.hip.libdevice.cosh(a)",
         lambda x: (-x * 7).fmod(2.0) + x.cosh()),
        (f"{LIBDEVICE}.remainder(-a * 7, 2.0)",
         lambda x: torch.tensor([math.remainder(-v * 7, 2.0) for v in x.tolist()])))),
])  # fmt: skip
def test_operations(given, expression, expected):
    how = {"atol": 1e-5, "rtol": 1.3e-6} if given[0] is POSITIVE or given[0] is MATRIX else {}
    check(expression, expected(*given).contiguous(), **dict(zip("ab", given, strict=False)), **how)


def test_high_words_of_products():
    """Random numbers are made of them."""
    wrapped = [(n * 100000007 & 0xFFFFFFFF) * (n * 1000003 & 0xFFFFFFFF) >> 32 for n in range(1024)]
    check("tl.umulhi(i * 100000007, i * 1000003)", torch.tensor(wrapped).int(), i=torch.arange(1024).int())


SCALED = """
a = tl.full([32, 32], 0, tl.uint8).to(tl.float8e5, bitcast=True)
scale = tl.full([32, 1], 127, tl.uint8)
tl.dot_scaled(a, scale, "e5m2", a, scale, "e5m2")
"""


@table("text, key", [
    ("tl.store(x, tl.extra.libdevice.byte_perm(tl.load(x), 1, 2))", "kernel.library"), (SCALED, "names"),
])  # fmt: skip
def test_what_is_not_there_is_named(text, key):
    with raises(NotImplementedError, key, name="tl.dot_scaled"):
        kernel_of(triton.jit, "x", text, tl=tl)[(1,)](torch.zeros(1, dtype=I32))


@triton.jit
def described(source, out, rows, M, N, HOW: tl.constexpr, B: tl.constexpr, PADDING: tl.constexpr = "zero"):
    i, j = tl.program_id(0) * B, tl.program_id(1) * B
    if HOW == "rows":
        inp = tl.make_tensor_descriptor(source, [M, N], [N, 1], [1, B])
        target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [1, B])
        target.scatter(inp.gather(tl.load(rows + tl.arange(0, B)), B), tl.arange(0, B), 0)
    elif HOW == "pointers":
        inp = tl.make_block_ptr(source, (M, N), (N, 1), (i, 0), (B, B), (1, 0))
        target = tl.make_block_ptr(out, (M, N), (N, 1), (i, 0), (B, B), (1, 0))
        for _ in range(0, N, B):
            tl.store(target, tl.load(inp, boundary_check=(0, 1)), boundary_check=(0, 1))
            inp = tl.advance(inp, (0, B))
            target = tl.advance(target, (0, B))
    elif HOW == "host":
        target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [B, B])
        target.store([i, j], source.load([i, j]))
    else:
        inp = tl.make_tensor_descriptor(source, [M, N], [N, 1], [B, B], padding_option=PADDING)
        if HOW == "tiles":
            target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [B, B])
            target.store([i, j], inp.load([i, j]))
        else:
            tl.store(out + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], inp.load([0, 0]).to(tl.float32))


@pytest.mark.filterwarnings("ignore")
def test_descriptors_clip_at_the_border():
    x = randn(24, 40)
    on_host = TensorDescriptor.from_tensor(x, [16, 16])
    for how, given in (("tiles", x), ("host", on_host), ("pointers", x))[: 3 if TRITON < (3, 9) else 2]:
        out = torch.zeros(26, 40)
        described[(2, 3) if how != "pointers" else (2,)](given, out, x, 24, 40, HOW=how, B=16)
        assert torch.equal(out[:24], x)
        assert not out[24:].any()


def test_descriptors_gather_and_scatter_rows():
    x, out = randn(16, 16), torch.zeros(16, 16)
    rows = torch.tensor([5, 0, 9, 5, 3, 2, 1, 15], dtype=I32)
    described[(1,)](x, out, rows, 16, 16, HOW="rows", B=8)
    assert torch.equal(out[:8, :8], x[rows.long(), 8:])
    assert not out[8:].any()


@table("dtype", [torch.uint8, I32, torch.bfloat16, torch.float16, torch.float32])
def test_what_descriptors_load_beyond_the_border(dtype):
    x, out, expected = torch.full((16, 16), 200).to(dtype), torch.zeros(32, 32), torch.zeros(32, 32)
    expected[:16, :16] = 200
    described[(1,)](x, out, x, 16, 16, HOW="padding", B=32)
    assert torch.equal(out, expected)
    if dtype.is_floating_point:
        described[(1,)](x, out, x, 16, 16, HOW="padding", B=32, PADDING="nan")
        assert int(out.isnan().sum()) == 32 * 32 - 16 * 16
        assert torch.equal(out[:16, :16], expected[:16, :16])


# tests/multirank/test_rma.py has every operation with every type and order
AT_ONE_PLACE = "i = tl.arange(0, 64)\ntl.store(old + i, tl.atomic_add(p + i * 0, tl.load(v + i), mask=i % 2 == 0))"


@table("dtype", [I32, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lanes_with_the_same_address_all_count(dtype):
    p, old = torch.zeros(1, dtype=dtype), torch.full((64,), 99, dtype=dtype)
    kernel_of(triton.jit, "p, v, old", AT_ONE_PLACE, tl=tl)[(4,)](p, torch.ones(64, dtype=dtype), old)
    assert p.item() == 128
    assert not old[1::2].any()  # lanes that are masked off do nothing and return 0
