"""Number formats and conversions: against torch, which rounds as GPUs do, and against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_triton import interpreter
from iris_triton.interpreter.frontend import numerics


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


TRITON = {
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTS = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# -- the module `numerics` --------------------------------------------------------------------------------------------
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
@settings(deadline=None)
def test_bf16_rounds_as_torch(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16()
    got = torch.from_numpy(numerics.f32_to_bf16(array).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])
    back = numerics.bf16_to_f32(numerics.f32_to_bf16(array))
    assert np.array_equal(back, expected.float().numpy(), equal_nan=True)


FP8 = {"fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz,
       "fp8e5b16": torch.float8_e5m2fnuz}  # fmt: skip


@pytest.mark.parametrize("name", FP8)
def test_fp8_values_are_torchs(name):
    expected = torch.arange(256, dtype=torch.uint8).view(FP8[name]).float().numpy()
    assert np.array_equal(numerics.fp8_values(name), expected, equal_nan=True)


@pytest.mark.parametrize("name", [*FP8, "fp8e4b15"])
@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20))
@settings(deadline=None)
def test_fp8_rounds_to_the_nearest_value(name, values):
    array = np.array(values, np.float32)
    codes = numerics.to_fp8(array, name)
    got = numerics.fp8_to_f32(codes, name)
    finite = numerics.fp8_values(name)
    finite = finite[np.isfinite(finite)]
    best = np.abs(finite[None, :].astype(np.float64) - array[:, None]).min(axis=1)
    assert np.array_equal(np.abs(got.astype(np.float64) - array), best)
    ties = (np.abs(finite[None, :].astype(np.float64) - array[:, None]) == best[:, None]).sum(axis=1) > 1
    assert not (codes[ties & (got != 0)] & 1).any()
    truncated = numerics.fp8_to_f32(numerics.to_fp8(array, name, towards_zero=True), name)
    assert (np.abs(truncated) <= np.abs(array)).all()


@given(st.lists(st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 3), min_size=1, max_size=10))
@settings(deadline=None)
def test_fma_rounds_once(triples):
    x, y, z = np.array(triples, np.float32).T
    got = numerics.fma(x, y, z)
    for a, b, c, r in zip(x.tolist(), y.tolist(), z.tolist(), got, strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        error = abs(Fraction(float(r)) - exact)
        for neighbour in (np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_umulhi_is_the_upper_half_of_the_unsigned_product(dtype, data):
    info = np.iinfo(dtype)
    pair = st.tuples(*[st.integers(int(info.min), int(info.max))] * 2)
    a, b = np.array(data.draw(st.lists(pair, min_size=1, max_size=8)), dtype).T
    bits = info.bits
    mask = 2**bits - 1
    expected = [((int(x) & mask) * (int(y) & mask)) >> bits for x, y in zip(a, b, strict=True)]
    got = numerics.umulhi(a, b)
    assert got.dtype == dtype
    assert [int(x) & mask for x in got] == expected


@given(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1)), min_size=1))
@settings(deadline=None)
def test_division_truncates_and_never_traps(pairs):
    a, b = np.array(pairs, np.int32).T
    with np.errstate(all="ignore"):
        quotient, rest = numerics.int_div(a, b), np.fmod(a, b)
    for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), rest.tolist(), strict=True):
        if y == 0:
            assert (q, r) == (0, 0)
        elif (x, y) != (-(2**31), -1):
            expected = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            assert (q, r) == (expected, x - expected * y)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_float_to_int_saturates(dtype):
    info = np.iinfo(dtype)
    values = np.array([1.9, -1.9, 1e30, -1e30, np.nan, np.inf, -np.inf, float(info.max)], np.float64)
    got = numerics.float_to_int(values, np.dtype(dtype)).tolist()
    low = max(int(info.min), -1)
    assert got == [1, low, info.max, info.min, 0, info.max, info.min, info.max]


# -- through kernels --------------------------------------------------------------------------------------------------
@triton.jit
def cast_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def run_cast(x, dtype):
    out = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, B=x.numel())
    return out


@pytest.mark.parametrize("target", FLOATS)
def test_casts_to_floats_match_torch(target):
    for source in [*INTS, *UNSIGNED, *FLOATS]:
        x = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 100).double()
        x = x.abs().to(source) if source in UNSIGNED else x.to(source)
        expected = x.float().to(target) if target is torch.bfloat16 or not source.is_floating_point else x.to(target)
        if source in (torch.int64, torch.int32) and target is torch.float64:
            expected = x.double()
        assert torch.equal(run_cast(x, target), expected)


@pytest.mark.parametrize("target", INTS)
def test_casts_to_ints_match_torch_in_range(target):
    for source in [*INTS, *FLOATS]:
        x = torch.tensor([0, 1, -1, 2.75, -2.75, 100, -100, 63.5]).to(source)
        assert torch.equal(run_cast(x, target), x.to(target))


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_narrowing_keeps_the_low_bits(target):
    for source in [torch.int32, torch.int64]:
        x = torch.tensor([0, 255, 256, -1, 2**31 - 1, -(2**31), 12345, 70000], dtype=source)
        assert torch.equal(run_cast(x, target).long(), x.to(target).long())


def test_unsigned_values_are_zero_extended():
    for source in UNSIGNED:
        x = torch.tensor([torch.iinfo(source).max, 1, 0, 7], dtype=source)
        assert run_cast(x, torch.int64).tolist() == [torch.iinfo(source).max, 1, 0, 7]
        assert run_cast(x, torch.float64).tolist() == [torch.iinfo(source).max, 1, 0, 7]


def test_out_of_range_and_nan_conversions_saturate():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e10])
    assert run_cast(x, torch.int32).tolist() == [0, 2**31 - 1, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_fp8_through_kernels(dtype):
    x = torch.tensor([0.1, -3.3, 17.0, 0.0, 100.0, -0.0625, 2.5, 1e-3])
    assert torch.equal(run_cast(x, dtype).float(), x.to(dtype).float())
    assert torch.equal(run_cast(x.to(dtype), torch.float32), x.to(dtype).float())


@triton.jit
def arithmetic_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + B + i, a - b)
    tl.store(out + 2 * B + i, a * b)
    tl.store(out + 3 * B + i, tl.where(a > b, a, -b))
    tl.store(out + 4 * B + i, tl.maximum(a, b))
    tl.store(out + 5 * B + i, tl.minimum(a, b))


def test_arithmetic_matches_torch():
    for dtype in [*INTS, *FLOATS]:
        generator = torch.Generator().manual_seed(1)
        a, b = ((torch.randn(64, generator=generator) * 10).to(dtype) for _ in range(2))
        out = torch.zeros(6, 64, dtype=dtype)
        arithmetic_kernel[(1,)](a, b, out, B=64)
        expected = [a + b, a - b, a * b, torch.where(a > b, a, -b), torch.maximum(a, b), torch.minimum(a, b)]
        assert torch.equal(out, torch.stack(expected))


@triton.jit
def divide_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, (a / b).to(out.dtype.element_ty))


def test_true_division():
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.int32]:
        a, b = torch.tensor([1, 7, -9, 100]).to(dtype), torch.tensor([3, 2, 4, 8]).to(dtype)
        out = torch.zeros(4, dtype=torch.float64)
        divide_kernel[(1,)](a, b, out, B=4)
        torch.testing.assert_close(out, (a / b).double(), atol=0, rtol=0 if dtype is not torch.bfloat16 else 2**-8)


@triton.jit
def unsigned_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + B + i, a % b)
    tl.store(out + 2 * B + i, tl.maximum(a, b))
    tl.store(out + 3 * B + i, (a > b).to(out.dtype.element_ty))
    tl.store(out + 4 * B + i, a >> 1)
    tl.store(out + 5 * B + i, a + b)


def test_unsigned_arithmetic():
    for dtype in [torch.uint8, torch.uint16, torch.uint32]:
        top = torch.iinfo(dtype).max
        a, b = [top, top - 6, 5, 200], [2, top, top, 7]
        out = torch.zeros(6, 4, dtype=dtype)
        unsigned_kernel[(1,)](torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), out, B=4)
        pairs = list(zip(a, b, strict=True))
        expected = [
            [x // y for x, y in pairs],
            [x % y for x, y in pairs],
            [max(p) for p in pairs],
            [int(x > y) for x, y in pairs],
            [x >> 1 for x in a],
            [(x + y) & top for x, y in pairs],
        ]
        assert out.tolist() == expected


@triton.jit
def nan_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.maximum(a, b))
    tl.store(out + B + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 2 * B + i, tl.clamp(a, -1.0, 1.0))
    tl.store(out + 3 * B + i, (a == a).to(tl.float32) + 2 * (a != a).to(tl.float32) + 4 * (a < b).to(tl.float32))


def test_nan_and_infinity():
    nan, inf = float("nan"), float("inf")
    a, b = torch.tensor([nan, 1.0, inf, -inf]), torch.tensor([2.0, nan, 3.0, 4.0])
    out = torch.zeros(4, 4)
    nan_kernel[(1,)](a, b, out, B=4)
    assert out[0].tolist() == [2, 1, inf, 4]
    assert out[1].isnan().tolist() == [True, True, False, False]
    assert out[2].tolist()[1:] == [1, 1, -1]
    assert out[3].tolist() == [2, 1, 1, 5]


@triton.jit
def shift_kernel(x, n, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, k = tl.load(x + i), tl.load(n + i)
    tl.store(out + i, a << k)
    tl.store(out + B + i, a >> k)
    tl.store(out + 2 * B + i, a ^ k | a & 3)
    tl.store(out + 3 * B + i, ~a)


def test_shifts_and_bits():
    a, k = torch.tensor([1, -8, 2**30, -1], dtype=torch.int32), torch.tensor([3, 1, 1, 31], dtype=torch.int32)
    out = torch.zeros(4, 4, dtype=torch.int32)
    shift_kernel[(1,)](a, k, out, B=4)
    assert torch.equal(out, torch.stack([a << k, a >> k, (a ^ k) | (a & 3), ~a]))


@triton.jit
def bitcast_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    bits = tl.load(x + i).to(tl.int32, bitcast=True)
    tl.store(out + i, bits)
    tl.store(out + B + i, bits.to(tl.float32, bitcast=True).to(tl.int32))


def test_bitcasts():
    x = torch.tensor([1.0, -2.0, 3.5, 0.0])
    out = torch.zeros(2, 4, dtype=torch.int32)
    bitcast_kernel[(1,)](x, out, B=4)
    assert torch.equal(out[0], x.view(torch.int32))
    assert torch.equal(out[1], x.int())


@triton.jit
def bool_kernel(flags, out, B: tl.constexpr):
    i = tl.arange(0, B)
    f = tl.load(flags + i)
    tl.store(out + i, f & (i > 1))
    tl.store(out + B + i, f | (i > 1))
    tl.store(out + 2 * B + i, ~f)
    tl.store(out + 3 * B + i, f != (i > 1))


def test_bool_tensors():
    flags = torch.tensor([True, False, True, False])
    out = torch.zeros(4, 4, dtype=torch.bool)
    bool_kernel[(1,)](flags, out, B=4)
    late = torch.arange(4) > 1
    assert torch.equal(out, torch.stack([flags & late, flags | late, ~flags, flags ^ late]))
