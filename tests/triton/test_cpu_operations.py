"""Reductions, scans, shapes, products, random numbers, mathematical functions, descriptors, atomics: against torch."""

import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import table
from triton.tools.tensor_descriptor import TensorDescriptor

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
I32 = torch.int32


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit
def keep(out, results, N: tl.constexpr):
    """One result per row."""
    for k in tl.static_range(len(results)):
        tl.store(out + k * N + tl.arange(0, N), results[k])


# -- reductions and scans ---------------------------------------------------------------------------------------------
@triton.jit
def reduce(x, sums, maxima, minima, where, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    i = tl.arange(0, N if AXIS == 0 else M)
    tl.store(sums + i, tl.sum(v, axis=AXIS).to(sums.dtype.element_ty))
    tl.store(maxima + i, tl.max(v, axis=AXIS))
    tl.store(minima + i, tl.min(v, axis=AXIS))
    tl.store(where + i, tl.argmax(v, axis=AXIS))


@table("dtype", [torch.float32, torch.bfloat16, torch.float16, I32, torch.int8, torch.uint8])
def test_reductions(dtype):
    x = randn(16, 32) * 20
    x = (x.abs() if dtype is torch.uint8 else x).to(dtype)
    wide = torch.float32 if dtype.is_floating_point else I32
    for axis, count in enumerate((32, 16)):
        sums, where = torch.zeros(count, dtype=wide), torch.zeros(count, dtype=I32)
        maxima, minima = torch.zeros(2, count, dtype=dtype)
        reduce[(1,)](x, sums, maxima, minima, where, 16, 32, AXIS=axis)
        # 16-bit floats are summed in their own precision, as on GPUs.
        atol = {torch.float16: 0.3, torch.bfloat16: 2.0}.get(dtype, 1e-4)
        torch.testing.assert_close(sums, x.to(wide).sum(axis).to(wide), atol=atol, rtol=1e-2 if atol > 0.1 else 1e-6)
        assert torch.equal(maxima, x.amax(axis))
        assert torch.equal(minima, x.amin(axis))
        # The first of equal maxima wins.
        assert torch.equal(where.long(), (x == x.amax(axis, keepdim=True)).int().argmax(axis))


def test_maximum_ignores_nan_as_on_gpus():
    x, out = torch.ones(16, 32), torch.zeros(2, 16)
    x[:, 3], x[:, 4] = float("nan"), 7
    reduce[(1,)](x, torch.zeros(16), out[0], out[1], torch.zeros(16, dtype=I32), 16, 32, AXIS=1)
    assert (out[0] == 7).all()
    assert (out[1] == 1).all()


@triton.jit
def whole(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    value, index = tl.max(tl.reshape(v, [N * N]), axis=0, return_indices=True)
    rows = tl.sum(v, axis=1, keep_dims=True)
    xored = tl.xor_sum(v.to(tl.int32)).to(tl.float32)
    results = (tl.sum(v), tl.max(v), value, index.to(tl.float32), tl.sum(rows * rows), xored)
    for k in tl.static_range(6):
        tl.store(out + k, results[k])


def test_reductions_of_everything_and_kept_dimensions():
    x, out, xored = randn(8, 8) * 10, torch.zeros(6), 0
    whole[(1,)](x, out, N=8)
    for value in x.int().flatten().tolist():
        xored ^= value
    expected = [x.sum(), x.max(), x.max(), x.argmax(), (x.sum(1) ** 2).sum(), xored]
    torch.testing.assert_close(out, torch.tensor([float(e) for e in expected]), atol=1e-3, rtol=1e-5)


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def larger(a, b):
    if a > b:
        r = a
    else:
        r = b
    return r


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def combine(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    ra, rb = tl.reduce((a, b), 0, affine)
    tl.store(out, ra)
    tl.store(out + 1, rb)
    tl.store(out + 2, tl.reduce(a, 0, larger))
    sa, sb = tl.associative_scan((a, b), 0, affine)
    backwards = tl.associative_scan(a, 0, product, reverse=True)
    keep(out + N, (sa, sb, tl.associative_scan(a, 0, larger), backwards, tl.map_elementwise(larger, a, 0.5)), N)


def test_own_combine_functions_keep_the_order():
    a, b = randn(8), randn(8, seed=1)
    out = torch.zeros(6, 8)
    combine[(1,)](a, b, out, N=8)
    ra, rb, running = a[0], b[0], [(a[0], b[0])]
    for x, y in zip(a[1:], b[1:], strict=True):
        ra, rb = ra * x, rb * x + y
        running.append((ra, rb))
    torch.testing.assert_close(out[0, :3], torch.stack([ra, rb, a.max()]))
    scans = [*map(torch.stack, zip(*running, strict=True)), a.cummax(0).values, a.flip(0).cumprod(0).flip(0)]
    torch.testing.assert_close(out[1:], torch.stack([*scans, a.clamp(min=0.5)]))


@triton.jit
def scan(x, out, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    tl.store(out + at, tl.cumsum(v, axis=1))
    tl.store(out + M * N + at, tl.cumsum(v, axis=0, reverse=True))
    tl.store(out + 2 * M * N + at, tl.cumprod(v, axis=1))


def test_scans():
    x, out = randn(4, 8), torch.zeros(3, 4, 8)
    scan[(1,)](x, out, 4, 8)
    torch.testing.assert_close(out, torch.stack([x.cumsum(1), x.flip(0).cumsum(0).flip(0), x.cumprod(1)]))


@triton.jit
def histogram(x, out, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    keep(out, (tl.histogram(v, BINS), tl.histogram(v, BINS, mask=i < N // 2)), BINS)


def test_histogram_drops_what_is_out_of_range():
    x = torch.randint(-2, 12, (64,), generator=torch.Generator().manual_seed(0), dtype=I32)
    out = torch.zeros(2, 8, dtype=I32)
    histogram[(1,)](x, out, N=64, BINS=8)
    for row, values in zip(out, (x, x[:32]), strict=True):
        assert row.tolist() == [int((values == b).sum()) for b in range(8)]


# -- shapes, products, functions --------------------------------------------------------------------------------------
@triton.jit
def shape(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    left, right = tl.split(tl.join(a, b))
    square = tl.reshape(a, [4, N // 4])
    filled = tl.full([N], 3.5, tl.float32) + tl.zeros([N], tl.float32) + tl.zeros_like(a)
    p, q = tl.split(tl.join(tl.load(x), tl.load(y)))
    rows = (
        left, right, tl.ravel(tl.trans(square)), tl.reshape(tl.permute(square, (1, 0)), [N]),
        tl.gather(a, (N - 1) - i, axis=0), tl.sort(a), tl.sort(a, descending=True), tl.flip(a, 0), filled,
        tl.zeros_like(a) + (p - q),
    )  # fmt: skip
    keep(out, rows, N)
    wide = tl.broadcast_to(tl.expand_dims(a, 0), [2, N])
    tl.store(out + 10 * N + tl.arange(0, 2)[:, None] * N + i[None, :], wide)
    keep(out + 12 * N, (tl.interleave(a, b), tl.cat(a, b, can_reorder=True)), 2 * N)


def test_shapes():
    x, y, out = randn(16), randn(16, seed=1), torch.zeros(16, 16)
    shape[(1,)](x, y, out, N=16)
    turned, rows = x.view(4, 4).T.flatten(), torch.ones(16)
    expected = [x, y, turned, turned, x.flip(0), x.sort().values, x.sort(descending=True).values, x.flip(0), rows * 3.5]
    expected += [rows * (x[0] - y[0]), x, x, *torch.stack([x, y], 1).view(2, 16), x, y]
    assert torch.equal(out, torch.stack(expected))


@triton.jit
def dot(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    acc = tl.load(c + m[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, acc, out_dtype=OUT))


@table("dtype, result, element, tolerance", [
    (torch.float32, torch.float32, tl.float32, 1e-4),
    (torch.float16, torch.float32, tl.float32, 1e-4),
    (torch.float16, torch.float16, tl.float16, 2e-2),
    (torch.bfloat16, torch.float32, tl.float32, 1e-4),
    (torch.float64, torch.float64, tl.float64, 1e-10),
    (torch.int8, I32, tl.int32, 0),
    (torch.float8_e4m3fn, torch.float32, tl.float32, 1e-4),
    (torch.float8_e5m2, torch.float32, tl.float32, 1e-4),
])  # fmt: skip
def test_dot(dtype, result, element, tolerance):
    scale = 40 if dtype is torch.int8 else 1
    a, b = (randn(16, 32) * scale).to(dtype), (randn(32, 16, seed=1) * scale).to(dtype)
    c, out = (randn(16, 16, seed=2) * 4).to(result), torch.zeros(16, 16, dtype=result)
    dot[(1,)](a, b, c, out, 16, 16, 32, OUT=element)
    expected = (a.double() @ b.double() + c.double()).to(result)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@triton.jit
def mathematics(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    lib: tl.constexpr = tl.extra.libdevice
    keep(out, (
        tl.exp(v) + tl.exp2(v), tl.log(v) + tl.log2(v), tl.sin(v) + tl.cos(v), tl.erf(v) + tl.abs(-v),
        tl.sqrt(v) + tl.rsqrt(v) + tl.sqrt_rn(v), tl.floor(v) + tl.ceil(v), tl.fma(v, v, v) + tl.div_rn(v, v + 1),
        tl.sigmoid(v) + tl.clamp(v, 0.5, 1.0), tl.softmax(v), lib.tanh(v) + lib.erf(v) + lib.erfinv(v / 4),
        lib.pow(v, 2.0) + lib.atan2(v, 1.0) + lib.fast_expf(v),
        lib.isnan(v).to(tl.float32) + lib.rint(v * 3) + lib.rsqrt(v * v + 1),
        tl.extra.cuda.libdevice.fmod(-v * 7, 2.0) + tl.extra.hip.libdevice.cosh(v), lib.remainder(-v * 7, 2.0),
    ), N)  # fmt: skip


def test_mathematical_functions():
    x, out = (randn(32).abs() + 0.1).clamp(max=3), torch.zeros(14, 32)
    mathematics[(1,)](x, out, N=32)
    expected = [
        x.exp() + x.exp2(), x.log() + x.log2(), x.sin() + x.cos(), x.erf() + x, x.sqrt() + x.rsqrt() + x.sqrt(),
        x.floor() + x.ceil(), x * x + x + x / (x + 1), x.sigmoid() + x.clamp(0.5, 1.0), x.softmax(0),
        x.tanh() + x.erf() + (x / 4).erfinv(), x**2 + torch.atan2(x, torch.ones(32)) + x.exp(),
        (x * 3).round() + (x * x + 1).rsqrt(), (-x * 7).fmod(2.0) + x.cosh(),
        torch.tensor([math.remainder(-v * 7, 2.0) for v in x.tolist()]),
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-6)


@triton.jit
def random(bits, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    keep(bits, (tl.randint(seed, i), tl.umulhi(i * 100000007, i * 1000003)), N)


def test_random_numbers_are_philox():
    bits = torch.zeros(2, 1024, dtype=I32)
    random[(1,)](bits, 42, N=1024)
    # First words of Philox 4x32-10 with key 42 and counters 0, 1, computed here in plain Python.
    assert [b & 0xFFFFFFFF for b in bits[0, :2].tolist()] == [philox(n, 42) for n in range(2)]
    wrapped = [(n * 100000007 & 0xFFFFFFFF) * (n * 1000003 & 0xFFFFFFFF) >> 32 for n in range(1024)]
    assert [b & 0xFFFFFFFF for b in bits[1].tolist()] == wrapped


def philox(counter, key):
    c, k = [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


SCALED = """
a = tl.full([32, 32], 0, tl.uint8).to(tl.float8e5, bitcast=True)
scale = tl.full([32, 1], 127, tl.uint8)
tl.dot_scaled(a, scale, "e5m2", a, scale, "e5m2")
"""


@table("text, said", [
    ("tl.store(x, tl.extra.libdevice.byte_perm(tl.load(x), 1, 2))", r"__nv_byte_perm.*cpu_entry"),
    (SCALED, r"does not implement tl\.dot_scaled"),
])  # fmt: skip
def test_what_is_not_there_is_named(text, said):
    with pytest.raises(NotImplementedError, match=said):
        kernel_of(triton.jit, "x", text, tl=tl)[(1,)](torch.zeros(1, dtype=I32))


# -- descriptors and pointers -----------------------------------------------------------------------------------------
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


@triton.jit
def by_pointers(x, out, big, B: tl.constexpr):
    tl.store(out, tl.load(x + big.to(tl.int64) * 1024))
    tl.store(out + 1, tl.load(x + tl.cast(5, tl.uint32)))
    back = x + 8
    tl.store(out + 2, tl.load(back - 1))
    tl.store(out + 3, tl.load(back + (-2)))
    i = tl.arange(0, B)
    v = tl.load(x + i, mask=i < 6, other=-1.0, cache_modifier=".cv", eviction_policy="evict_first")
    tl.store(out + 4 + i, v, cache_modifier=".wt")
    tl.debug_barrier()
    tl.store(out + 4 + B + i, tl.load(x + i, volatile=True))


def test_pointer_arithmetic_is_64_bits_wide_and_hints_change_nothing():
    x, out = torch.empty(3 * 2**28), torch.zeros(20)  # 3 GiB of address space, of which three pages exist
    x[:16] = torch.arange(16.0)
    x[700000 * 1024] = 77.0
    by_pointers[(1,)](x, out, 700000, B=8)
    assert out.tolist() == [77, 5, 7, 6, *range(6), -1, -1, *range(8)]


# -- atomics within one process ---------------------------------------------------------------------------------------
# tests/multirank/test_atomics.py has every operation with every type and order
@triton.jit
def at_one_place(p, v, old, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_add(p + i * 0, tl.load(v + i), mask=i % 2 == 0))


@table("dtype", [I32, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lanes_with_the_same_address_all_count(dtype):
    p, old = torch.zeros(1, dtype=dtype), torch.full((64,), 99, dtype=dtype)
    at_one_place[(4,)](p, torch.ones(64, dtype=dtype), old, N=64)
    assert p.item() == 128
    assert not old[1::2].any()  # lanes that are masked off do nothing and return 0


@triton.jit
def compare_and_swap(p, old, cmp, val, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_cas(p + i, tl.load(cmp + i), tl.load(val + i)))


@table("dtype", [I32, torch.int64, torch.int16, torch.float32, torch.float64])
def test_compare_and_swap(dtype):
    rows = [1, 2, 3, 4], [0, 0, 0, 0], [1, 0, 3, 0], [10, 20, 30, 40]
    p, old, cmp, val = (torch.tensor(row).to(dtype) for row in rows)
    compare_and_swap[(1,)](p, old, cmp, val, N=4)
    assert p.tolist() == [10, 2, 30, 4]
    assert old.tolist() == [1, 2, 3, 4]


@triton.jit
def scalars(p, out, m, lock, counter, N: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(out, tl.atomic_add(p, 5, mask=m))
        tl.store(out + 1, tl.atomic_cas(p, 5, 7))
        tl.store(out + 2, tl.atomic_xchg(p, 9))
    for _ in range(N):
        while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
            pass
        tl.store(counter, tl.load(counter) + 1)
        tl.atomic_xchg(lock, 0, sem="release")


@table("mask, expected", [(True, [0, 5, 7]), (False, [0, 0, 0])])
def test_scalars_and_a_lock_among_programs(mask, expected):
    (p, lock, counter), out = torch.zeros(3, 1, dtype=I32), torch.zeros(3, dtype=I32)
    scalars[(8,)](p, out, mask, lock, counter, N=5)
    assert out.tolist() == expected
    assert (p.item(), counter.item()) == (9, 40)
