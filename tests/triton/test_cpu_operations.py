"""Reductions, scans, shapes, products, random numbers, mathematical functions, descriptors: against torch."""

import math

import pytest
import torch
import triton
import triton.language as tl

from iris_triton import interpreter

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit
def reduce_kernel(x, sums, maxima, minima, where, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    i = tl.arange(0, N if AXIS == 0 else M)
    tl.store(sums + i, tl.sum(v, axis=AXIS).to(sums.dtype.element_ty))
    tl.store(maxima + i, tl.max(v, axis=AXIS))
    tl.store(minima + i, tl.min(v, axis=AXIS))
    tl.store(where + i, tl.argmax(v, axis=AXIS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8])
def test_reductions(dtype):
    for axis in [0, 1]:
        x = (randn(16, 32) * 20).abs().to(dtype) if dtype is torch.uint8 else (randn(16, 32) * 20).to(dtype)
        count = 16 if axis == 1 else 32
        wide = torch.float32 if dtype.is_floating_point else torch.int32
        sums = torch.zeros(count, dtype=wide)
        maxima, minima = torch.zeros(2, count, dtype=dtype)
        where = torch.zeros(count, dtype=torch.int32)
        reduce_kernel[(1,)](x, sums, maxima, minima, where, 16, 32, AXIS=axis)
        # 16-bit floats are summed in their own precision, as on GPUs.
        atol = {torch.float16: 0.3, torch.bfloat16: 2.0}.get(dtype, 1e-4)
        torch.testing.assert_close(sums, x.to(wide).sum(axis).to(wide), atol=atol, rtol=1e-2 if atol > 0.1 else 1e-6)
        assert torch.equal(maxima, x.amax(axis))
        assert torch.equal(minima, x.amin(axis))
        # The first of equal maxima wins.
        assert torch.equal(where.long(), (x == x.amax(axis, keepdim=True)).int().argmax(axis))


@triton.jit
def whole_kernel(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out, tl.sum(v))
    tl.store(out + 1, tl.max(v))
    value, index = tl.max(tl.reshape(v, [N * N]), axis=0, return_indices=True)
    tl.store(out + 2, value)
    tl.store(out + 3, index.to(tl.float32))
    keep = tl.sum(v, axis=1, keep_dims=True)
    tl.store(out + 4, tl.sum(keep * keep))
    tl.store(out + 5, tl.xor_sum(v.to(tl.int32)).to(tl.float32))


def test_reductions_of_everything_and_kept_dimensions():
    x, out = randn(8, 8) * 10, torch.zeros(6)
    whole_kernel[(1,)](x, out, N=8)
    xored = 0
    for value in x.int().flatten().tolist():
        xored ^= value
    expected = [x.sum(), x.max(), x.max(), x.argmax(), (x.sum(1) ** 2).sum(), xored]
    torch.testing.assert_close(out, torch.tensor([float(e) for e in expected]), atol=1e-3, rtol=1e-5)


def test_maximum_ignores_nan_as_on_gpus():
    x = torch.ones(16, 32)
    x[:, 3] = float("nan")
    x[:, 4] = 7
    out = torch.zeros(2, 16)
    reduce_kernel[(1,)](x, torch.zeros(16), out[0], out[1], torch.zeros(16, dtype=torch.int32), 16, 32, AXIS=1)
    assert (out[0] == 7).all()
    assert (out[1] == 1).all()


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def branching(a, b):
    if a > b:
        r = a
    else:
        r = b
    return r


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def combine_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    ra, rb = tl.reduce((a, b), 0, affine)
    tl.store(out, ra)
    tl.store(out + 1, rb)
    tl.store(out + 2, tl.reduce(a, 0, branching))
    sa, sb = tl.associative_scan((a, b), 0, affine)
    tl.store(out + N + i, sa)
    tl.store(out + 2 * N + i, sb)
    tl.store(out + 3 * N + i, tl.associative_scan(a, 0, branching))
    tl.store(out + 4 * N + i, tl.associative_scan(a, 0, product, reverse=True))


def test_own_combine_functions_keep_the_order():
    a, b = randn(8), randn(8, seed=1)
    out = torch.zeros(5, 8)
    combine_kernel[(1,)](a, b, out, N=8)
    ra, rb, running = a[0], b[0], [(a[0], b[0])]
    for x, y in zip(a[1:], b[1:], strict=True):
        ra, rb = ra * x, rb * x + y
        running.append((ra, rb))
    torch.testing.assert_close(out[0, :3], torch.stack([ra, rb, a.max()]))
    torch.testing.assert_close(out[1], torch.stack([r[0] for r in running]))
    torch.testing.assert_close(out[2], torch.stack([r[1] for r in running]))
    torch.testing.assert_close(out[3], a.cummax(0).values)
    torch.testing.assert_close(out[4], a.flip(0).cumprod(0).flip(0))


@triton.jit
def scan_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + at)
    tl.store(out + at, tl.cumsum(v, axis=1))
    tl.store(out + M * N + at, tl.cumsum(v, axis=0, reverse=True))
    tl.store(out + 2 * M * N + at, tl.cumprod(v, axis=1))


def test_scans():
    x, out = randn(4, 8), torch.zeros(3, 4, 8)
    scan_kernel[(1,)](x, out, 4, 8)
    torch.testing.assert_close(out[0], x.cumsum(1))
    torch.testing.assert_close(out[1], x.flip(0).cumsum(0).flip(0))
    torch.testing.assert_close(out[2], x.cumprod(1))


@triton.jit
def sort_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.sort(v))
    tl.store(out + N + i, tl.sort(v, descending=True))
    tl.store(out + 2 * N + i, tl.flip(v, 0))


def test_sort_and_flip():
    x, out = randn(32), torch.zeros(3, 32)
    sort_kernel[(1,)](x, out, N=32)
    assert torch.equal(out, torch.stack([x.sort().values, x.sort(descending=True).values, x.flip(0)]))


@triton.jit
def histogram_kernel(x, out, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + tl.arange(0, BINS), tl.histogram(v, BINS))
    tl.store(out + BINS + tl.arange(0, BINS), tl.histogram(v, BINS, mask=i < N // 2))


def test_histogram_drops_what_is_out_of_range():
    x = torch.randint(-2, 12, (64,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    out = torch.zeros(2, 8, dtype=torch.int32)
    histogram_kernel[(1,)](x, out, N=64, BINS=8)
    for row, values in zip(out, (x, x[:32]), strict=True):
        assert row.tolist() == [int((values == b).sum()) for b in range(8)]


@triton.jit
def shape_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    joined = tl.join(a, b)
    left, right = tl.split(joined)
    tl.store(out + i, left)
    tl.store(out + N + i, right)
    tl.store(out + 2 * N + tl.arange(0, 2 * N), tl.interleave(a, b))
    tl.store(out + 4 * N + tl.arange(0, 2 * N), tl.cat(a, b, can_reorder=True))
    square = tl.reshape(a, [4, N // 4])
    tl.store(out + 6 * N + i, tl.ravel(tl.trans(square)))
    tl.store(out + 7 * N + i, tl.reshape(tl.permute(square, (1, 0)), [N]))
    wide = tl.broadcast_to(tl.expand_dims(a, 0), [2, N])
    tl.store(out + 8 * N + tl.arange(0, 2)[:, None] * N + i[None, :], wide)
    tl.store(out + 10 * N + i, tl.gather(a, (N - 1) - i, axis=0))
    tl.store(out + 11 * N + i, tl.full([N], 3.5, tl.float32) + tl.zeros([N], tl.float32) + tl.zeros_like(a))
    p, q = tl.split(tl.join(tl.load(x), tl.load(y)))
    tl.store(out + 12 * N, p - q)


def test_shapes():
    x, y, out = randn(16), randn(16, seed=1), torch.zeros(13, 16)
    shape_kernel[(1,)](x, y, out, N=16)
    assert torch.equal(out[0], x)
    assert torch.equal(out[1], y)
    assert torch.equal(out[2:4].flatten(), torch.stack([x, y], 1).flatten())
    assert torch.equal(out[4:6].flatten(), torch.cat([x, y]))
    assert torch.equal(out[6], x.view(4, 4).T.flatten())
    assert torch.equal(out[7], x.view(4, 4).T.flatten())
    assert torch.equal(out[8:10], x.expand(2, 16))
    assert torch.equal(out[10], x.flip(0))
    assert (out[11] == 3.5).all()
    assert out[12, 0] == x[0] - y[0]


@triton.jit
def dot_kernel(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    acc = tl.load(c + m[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, acc, out_dtype=OUT))


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.int8, torch.int32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
    ],
)
def test_dot(dtype, result):
    a, b = randn(16, 32), randn(32, 16, seed=1)
    if dtype is torch.int8:
        a, b = (a * 40).to(dtype), (b * 40).to(dtype)
    else:
        a, b = a.to(dtype), b.to(dtype)
    c = (randn(16, 16, seed=2) * 4).to(result)
    out = torch.zeros(16, 16, dtype=result)
    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.float64: tl.float64, torch.int32: tl.int32}
    dot_kernel[(1,)](a, b, c, out, 16, 16, 32, OUT=names[result])
    expected = (a.double() @ b.double() + c.double()).to(result)
    tolerance = {torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10, torch.int32: 0}[result]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@triton.jit
def math_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.exp(v) + tl.exp2(v))
    tl.store(out + N + i, tl.log(v) + tl.log2(v))
    tl.store(out + 2 * N + i, tl.sin(v) + tl.cos(v))
    tl.store(out + 3 * N + i, tl.sqrt(v) + tl.rsqrt(v) + tl.sqrt_rn(v))
    tl.store(out + 4 * N + i, tl.erf(v) + tl.abs(-v))
    tl.store(out + 5 * N + i, tl.floor(v) + tl.ceil(v))
    tl.store(out + 6 * N + i, tl.fma(v, v, v) + tl.div_rn(v, v + 1))
    tl.store(out + 7 * N + i, tl.sigmoid(v) + tl.clamp(v, 0.5, 1.0))
    tl.store(out + 8 * N + i, tl.softmax(v))


def test_mathematical_functions():
    x, out = randn(32).abs() + 0.1, torch.zeros(9, 32)
    math_kernel[(1,)](x, out, N=32)
    expected = [
        x.exp() + x.exp2(),
        x.log() + x.log2(),
        x.sin() + x.cos(),
        x.sqrt() + x.rsqrt() + x.sqrt(),
        x.erf() + x,
        x.floor() + x.ceil(),
        x * x + x + x / (x + 1),
        x.sigmoid() + x.clamp(0.5, 1.0),
        x.softmax(0),
    ]
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-6, rtol=1e-6)


@triton.jit
def libdevice_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    lib = tl.extra.libdevice
    tl.store(out + i, lib.tanh(v) + lib.erf(v) + lib.erfinv(v / 2))
    tl.store(out + N + i, lib.pow(v, 2.0) + lib.atan2(v, 1.0) + lib.fast_expf(v))
    tl.store(out + 2 * N + i, lib.isnan(v).to(tl.float32) + lib.rint(v * 3) + lib.rsqrt(v * v + 1))
    tl.store(out + 3 * N + i, tl.extra.cuda.libdevice.fmod(v * 7, 2.0) + tl.extra.hip.libdevice.cosh(v))
    tl.store(out + 4 * N + i, lib.remainder(v * 7, 2.0))


def test_libdevice():
    x, out = randn(8).clamp(-1.5, 1.5), torch.zeros(5, 8)
    libdevice_kernel[(1,)](x, out, N=8)
    expected = [
        x.tanh() + x.erf() + (x / 2).erfinv(),
        x**2 + torch.atan2(x, torch.ones(8)) + x.exp(),
        (x * 3).round() + (x * x + 1).rsqrt(),
        (x * 7).fmod(2.0) + x.cosh(),
        torch.tensor([math.remainder(v * 7, 2.0) for v in x.tolist()]),
    ]
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


@triton.jit
def unknown_library_kernel(x):
    tl.store(x, tl.extra.libdevice.byte_perm(tl.load(x), 1, 2))


def test_an_unknown_library_function_is_named():
    with pytest.raises(NotImplementedError, match=r"__nv_byte_perm.*cpu_entry"):
        unknown_library_kernel[(1,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def random_kernel(out, bits, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.rand(seed, i))
    tl.store(out + N + i, tl.randn(seed, i))
    tl.store(bits + i, tl.randint(seed, i))
    tl.store(bits + N + i, tl.umulhi(i * 100000007, i * 1000003))


def test_random_numbers_are_philox():
    out, bits = torch.zeros(2, 1024), torch.zeros(2, 1024, dtype=torch.int32)
    random_kernel[(1,)](out, bits, 42, N=1024)
    assert 0.45 < out[0].mean() < 0.55
    assert out[0].min() >= 0
    assert out[0].max() < 1
    assert abs(out[1].mean()) < 0.15
    assert 0.9 < out[1].std() < 1.1
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


@triton.jit
def select(x, limit):
    if x > limit:
        r = x * 2
    else:
        r = -x
    return r


@triton.jit
def elementwise_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.map_elementwise(select, tl.load(x + i), 0.5))


def test_map_elementwise_runs_branches_per_element():
    x, out = randn(16), torch.zeros(16)
    elementwise_kernel[(1,)](x, out, N=16)
    assert torch.equal(out, torch.where(x > 0.5, x * 2, -x))


@triton.jit
def descriptor_kernel(x, out, M, N, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [B, B])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [B, B])
    i, j = tl.program_id(0) * B, tl.program_id(1) * B
    target.store([i, j], source.load([i, j]) + 1)


def test_tensor_descriptors_clip_at_the_border():
    x, out = randn(24, 40), torch.zeros(24, 40)
    descriptor_kernel[(2, 3)](x, out, 24, 40, B=16)
    assert torch.equal(out, x + 1)


@triton.jit
def host_descriptor_kernel(source, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i[:, None] * B + i[None, :], source.load([0, 0]))


def test_descriptors_made_on_the_host():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = randn(16, 16), torch.zeros(16, 16)
    host_descriptor_kernel[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), out, B=16)
    assert torch.equal(out, x)


@triton.jit
def descriptor_rows_kernel(x, rows, out, M, N, R: tl.constexpr, C: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [1, C])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [1, C])
    wanted = tl.load(rows + tl.arange(0, R))
    target.scatter(source.gather(wanted, C), tl.arange(0, R), 0)


def test_descriptors_gather_and_scatter_rows():
    x, out = randn(16, 16), torch.zeros(16, 16)
    rows = torch.tensor([5, 0, 9, 5, 3, 2, 1, 15], dtype=torch.int32)
    descriptor_rows_kernel[(1,)](x, rows, out, 16, 16, R=8, C=8)
    assert torch.equal(out[:8, :8], x[rows.long(), 8:])
    assert not out[8:].any()


@triton.jit
def padding_kernel(x, out, N, B: tl.constexpr, PADDING: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [N, N], [N, 1], [B, B], padding_option=PADDING)
    i = tl.arange(0, B)
    tl.store(out + i[:, None] * B + i[None, :], source.load([0, 0]).to(out.dtype.element_ty))


def test_what_descriptors_load_beyond_the_border():
    for dtype in [torch.uint8, torch.int32, torch.bfloat16, torch.float16, torch.float32]:
        x, out = torch.full((16, 16), 200).to(dtype), torch.zeros(32, 32)
        expected = torch.zeros(32, 32)
        expected[:16, :16] = 200
        padding_kernel[(1,)](x, out, 16, B=32, PADDING="zero")
        assert torch.equal(out, expected)
        if dtype.is_floating_point:
            padding_kernel[(1,)](x, out, 16, B=32, PADDING="nan")
            assert int(out.isnan().sum()) == 32 * 32 - 16 * 16
            assert torch.equal(out[:16, :16], expected[:16, :16])


@triton.jit
def scaled_kernel(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    scale = tl.full([N, N // 32], 127, tl.uint8)
    tl.store(out + i[:, None] * N + i[None, :], tl.dot_scaled(x, scale, "e5m2", x, scale, "e5m2"))


def test_scaled_products_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"does not implement tl\.dot_scaled"):
        scaled_kernel[(1,)](torch.zeros(32, 32).to(torch.float8_e5m2), torch.zeros(32, 32), N=32)


@triton.jit
def block_pointer_kernel(x, out, M, N, B: tl.constexpr):
    source = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (B, B), (1, 0))
    target = tl.make_block_ptr(out, (M, N), (N, 1), (0, 0), (B, B), (1, 0))
    for _ in range(0, N, B):
        tl.store(target, tl.load(source, boundary_check=(0, 1)) * 2, boundary_check=(0, 1))
        source = tl.advance(source, (0, B))
        target = tl.advance(target, (0, B))


@pytest.mark.skipif(TRITON >= (3, 9), reason="Triton 3.9 has no block pointers")
@pytest.mark.filterwarnings("ignore")
def test_block_pointers():
    x, out = randn(12, 28), torch.zeros(12, 28)
    block_pointer_kernel[(1,)](x, out, 12, 28, B=16)
    assert torch.equal(out, x * 2)


@triton.jit
def offset_kernel(x, out, big):
    tl.store(out, tl.load(x + big.to(tl.int64) * 1024))
    tl.store(out + 1, tl.load(x + tl.cast(5, tl.uint32)))
    back = x + 8
    tl.store(out + 2, tl.load(back - 1))
    tl.store(out + 3, tl.load(back + (-2)))


def test_pointer_arithmetic_is_64_bits_wide():
    # 3 GiB of address space, of which three pages exist.
    x = torch.empty(3 * 2**28)
    x[:16] = torch.arange(16.0)
    x[700000 * 1024] = 77.0
    out = torch.zeros(4)
    offset_kernel[(1,)](x, out, 700000)
    assert out.tolist() == [77, 5, 7, 6]


@triton.jit
def cache_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i, mask=i < 6, other=-1.0, cache_modifier=".cv", eviction_policy="evict_first")
    tl.store(out + i, v, cache_modifier=".wt")
    tl.debug_barrier()
    tl.store(out + B + i, tl.load(x + i, volatile=True))


def test_cache_hints_volatile_and_barriers():
    x, out = randn(8), torch.zeros(2, 8)
    cache_kernel[(1,)](x, out, B=8)
    assert out[0].tolist() == [*x[:6].tolist(), -1, -1]
    assert torch.equal(out[1], x)
