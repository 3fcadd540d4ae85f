"""Numbers: formats and conversions against torch, which rounds as GPUs do, and exact arithmetic; operators."""

import copy
import itertools
import operator
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_text import check
from tables import table

from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.frontend.calls import triton_dialect
from iris_triton.interpreter.frontend.operators import BINARY
from iris_triton.interpreter.frontend.values import block_type, numpy_dtype, wrap

INTS = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FP8 = {"fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz,
       "fp8e5b16": torch.float8_e5m2fnuz}  # fmt: skip
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", [*FP8, "fp8e4b15"])
@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20))
@settings(deadline=None)
def test_fp8_rounds_to_the_nearest_value(name, values):
    all_values = numerics.fp8_values(name)
    if name in FP8:
        expected = torch.arange(256, dtype=torch.uint8).view(FP8[name]).float().numpy()
        assert np.array_equal(all_values, expected, equal_nan=True)
    array = np.array(values, np.float32)
    codes = numerics.to_fp8(array, name)
    got = numerics.fp8_values(name)[codes]
    distances = np.abs(all_values[np.isfinite(all_values)].astype(np.float64) - array[:, None])
    best = distances.min(axis=1)
    assert np.array_equal(np.abs(got.astype(np.float64) - array), best)
    ties = (distances == best[:, None]).sum(axis=1) > 1
    assert not (codes[ties & (got != 0)] & 1).any()
    truncated = numerics.fp8_values(name)[numerics.to_fp8(array, name, towards_zero=True)]
    assert (np.abs(truncated) <= np.abs(array)).all()


@given(st.lists(st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 3), min_size=1, max_size=10))
@settings(deadline=None)
def test_fma_rounds_once(triples):
    x, y, z = np.array(triples, np.float32).T
    for a, b, c, r in zip(x.tolist(), y.tolist(), z.tolist(), numerics.fma(x, y, z), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        error = abs(Fraction(float(r)) - exact)
        for neighbour in (np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


@table("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_float_to_int_saturates(dtype):
    info = np.iinfo(dtype)
    values = np.array([1.9, -1.9, 1e30, -1e30, np.nan, np.inf, -np.inf, float(info.max)], np.float64)
    got = numerics.float_to_int(values, np.dtype(dtype)).tolist()
    assert got == [1, max(int(info.min), -1), info.max, info.min, 0, info.max, info.min, info.max]


SMALL = [0, 1, -1, 2.75, -2.75, 100, -100, 63.5]
RANDOM = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 100).tolist()
EDGES = [NAN, INF, -INF, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, 65504.0, 65519.0, 65520.0, 2.0**-133,
         2.0**-25, 3 * 2.0**-26, 1e-45]  # fmt: skip
"""What is half way between two numbers of 16 bits, or near the largest and the smallest."""
WIDE = [0, 255, 256, -1, 2**31 - 1, -(2**31), 12345, 70000]


@table("sources, targets, values", [
    ([*INTS, *FLOATS], FLOATS, RANDOM),
    (UNSIGNED, FLOATS, [abs(each) for each in RANDOM]), (FLOATS, FLOATS, EDGES),
    ([*INTS, *FLOATS], INTS, SMALL),
    ([torch.int32, torch.int64], [torch.int8, torch.uint8, torch.int16, torch.int32], WIDE),  # keeps the low bits
    ([torch.uint8], [torch.int64, torch.float64], [2**8 - 1, 1, 0, 7]),  # extended by zeros
    ([torch.uint16], [torch.int64, torch.float64], [2**16 - 1, 1, 0, 7]),
    ([torch.uint32], [torch.int64, torch.float64], [2**32 - 1, 1, 0, 7]),
    ([torch.float32], [torch.float8_e5m2, torch.float8_e4m3fn], [0.1, -3.3, 17.0, 0.0, 100.0, -0.0625, 2.5, 1e-3]),
    ([torch.float8_e5m2, torch.float8_e4m3fn], [torch.float32], [0.1, -3.3, 17.0, 0.0, 100.0, -0.0625, 2.5, 1e-3]),
])  # fmt: skip
def test_casts_match_torch(sources, targets, values):
    values = torch.tensor(values, dtype=torch.float64)
    for source, target in itertools.product(sources, targets):
        x = (values if source.is_floating_point else values.long()).to(source)
        once = x.float() if target is torch.bfloat16 else x  # GPUs round twice on the way from float64
        check("v.to(out.dtype.element_ty)", once.to(target), v=x)


@table("dtype", [*INTS, *FLOATS])
def test_arithmetic_matches_torch(dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = ((torch.randn(64, generator=generator) * 10).to(dtype) for _ in range(2))
    if dtype.is_floating_point:
        rtol = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 0)
        check("(a / b).to(tl.float64)", (a / b).double(), a=a, b=b, rtol=rtol)
    for expression, expected in (
        ("a + b", a + b), ("a - b", a - b), ("a * b", a * b), ("tl.where(a > b, a, -b)", torch.where(a > b, a, -b)),
        ("tl.maximum(a, b)", torch.maximum(a, b)), ("tl.minimum(a, b)", torch.minimum(a, b)),
    ):  # fmt: skip
        check(expression, expected, a=a, b=b)


@table("dtype", UNSIGNED)
def test_unsigned_arithmetic(dtype):
    top = torch.iinfo(dtype).max
    pairs = list(zip([top, top - 6, 5, 200], [2, top, top, 7], strict=True))
    a, b = (torch.tensor(each, dtype=dtype) for each in zip(*pairs, strict=True))
    for expression, value in (
        ("a // b", lambda x, y: x // y), ("a % b", lambda x, y: x % y), ("tl.maximum(a, b)", max),
        ("(a > b).to(a.dtype)", lambda x, y: int(x > y)), ("a >> 1", lambda x, y: x >> 1),
        ("a + b", lambda x, y: (x + y) & top),
    ):  # fmt: skip
        check(expression, torch.tensor([value(*pair) for pair in pairs], dtype=dtype), a=a, b=b)


def test_bits_nan_and_bools():
    a, b = torch.tensor([1, -8, 2**30, -1], dtype=torch.int32), torch.tensor([3, 1, 1, 31], dtype=torch.int32)
    x, y = torch.tensor([NAN, 1.0, INF, -INF]), torch.tensor([2.0, NAN, 3.0, 4.0])
    z, p, q = torch.tensor([1.0, -2.0, 3.5, 0.0]), torch.tensor([True, False, True, False]), torch.arange(4) > 1
    for expression, expected in (
        ("a // (b - b)", 0 * a), ("a % (b - b)", 0 * a), ("(a / b).to(tl.float64)", (a / b).double()),
        ("a << b", a << b), ("a >> b", a >> b), ("a ^ b | a & 3", (a ^ b) | (a & 3)), ("~a", ~a),
        ("tl.maximum(x, y)", torch.tensor([2.0, 1.0, INF, 4.0])),
        ("tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)", torch.tensor([NAN, NAN, INF, 4.0])),
        ("tl.clamp(y, 2.5, 3.5)", torch.tensor([2.5, 2.5, 3.0, 3.5])),
        ("x == x", x == x), ("x != x", x != x), ("x < y", x < y),
        ("z.to(tl.int32, bitcast=True)", z.view(torch.int32)),
        ("z.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True).to(tl.int32)", z.int()),
        ("p & q", p & q), ("p | q", p | q), ("~p", ~p), ("p != q", p ^ q),
    ):  # fmt: skip
        check(expression, expected, a=a, b=b, x=x, y=y, z=z, p=p, q=q)


DIALECT = triton_dialect()
TYPES = [tl.int1, tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.float16, tl.bfloat16, tl.float32, tl.float64]
SHAPES = [((), ()), ((), (4,)), ((4,), ()), ((4,), (4,)), ((1,), (4,)), ((1,), ()), ((4, 1), (1, 4)), ((4, 4), (4, 1)),
          ((4,), (8,)), ((4,), (4, 4))]  # fmt: skip
NAMES = {name: row[0] for name, row in BINARY.items() if row[1] is not None}


def make(type_, shape, seed):
    kept = numpy_dtype(type_)
    values = np.random.default_rng(seed).integers(1, 100, shape or (1,))
    if kept.kind == "i" and not type_.is_int_unsigned():
        values = values - 50
        values[values == 0] = 3
    data = (values % 2 == 0) if kept == np.bool_ else values.astype(kept)
    return wrap(data, block_type(type_, shape) if shape else type_)


def outcome(function, *operands):
    try:
        with np.errstate(all="ignore"):
            result = function(*operands)
    except Exception as error:  # noqa: BLE001 - the errors of both ways are compared, whatever they are
        return type(error).__name__
    shape = tuple(result.type.shape) if result.type.is_block() else (1,)
    assert tuple(int(s) for s in result.shape) == (shape if result.type.is_block() else ())
    return str(result.type), repr(np.broadcast_to(result.handle.data, shape).tolist())  # as text: nan equals nan


def ways(name):
    return DIALECT.helpers[name], lambda left, right: DIALECT.general(NAMES[name], left, right)


@pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
@pytest.mark.parametrize("name", NAMES)
def test_operators(name):
    fast, general = ways(name)
    compared = 0
    for left, right in itertools.product(TYPES, repeat=2):
        if left is not right and TYPES.index(right) % 3 and not (left.is_int_signed() and right.is_int_signed()):
            continue  # other unequal types take the general way on both sides; a third of them is enough
        for shape, other in SHAPES if left is right else SHAPES[::3]:
            a, b = make(left, shape, 1), make(right, other, 2)
            assert outcome(fast, a, b) == outcome(general, a, b), (left, right, shape, other)
            compared += 1
    assert compared > 200
    for type_, number in itertools.product(TYPES, [3, -3, 2.5, -2.0, True, 2**31, 2**40, 1e39]):
        a = make(type_, (4,), 3)
        for operands in ((a, number), (number, a), (a, tl.constexpr(number))):
            assert outcome(fast, *operands) == outcome(general, *operands), (type_, operands)
    # Python's own values are left to Python
    assert fast(7, tl.constexpr(3)) == getattr(operator, f"__{NAMES[name]}__")(7, 3)


@table("offset", [tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32])
def test_pointer_offsets(offset):
    fast, general = ways("Add")
    for element in (tl.int1, tl.int8, tl.float16, tl.float64, tl.pointer_type(tl.int8)):
        pointer = tl.pointer_type(element)
        for shape, other in SHAPES:
            base = wrap(np.full(shape or (1,), 2**40, np.uint64), block_type(pointer, shape) if shape else pointer)
            step = make(offset, other, 4)
            assert outcome(fast, base, step) == outcome(general, base, step), (element, shape, other)
        for number in (5, -5, 2**40):
            base = wrap(np.full(1, 2**40, np.uint64), pointer)
            assert outcome(fast, base, number) == outcome(general, base, number)


@table("type_", [tl.float32, tl.pointer_type(tl.float32)])
def test_types_can_be_copied_after_kernels_have_used_them(type_):
    """What fast paths keep on Triton's own types must not hinder programs that pass them to other processes."""
    used = block_type(type_, (8,))
    wrap(np.zeros(1, numpy_dtype(type_)), type_)
    for again in (pickle.loads(pickle.dumps(type_)), copy.deepcopy(type_)):
        assert again == type_
        assert block_type(again, (8,)) == used
