"""Fast paths hold the same as the semantic layer: values and types, for all operators, dtypes and shapes."""

import copy
import itertools
import operator
import pickle

import numpy as np
import pytest
import triton.language as tl

from iris_triton.interpreter.frontend.calls import triton_dialect
from iris_triton.interpreter.frontend.operators import BINARY
from iris_triton.interpreter.frontend.values import block_type, numpy_dtype, wrap

DIALECT = triton_dialect()
TYPES = [tl.int1, tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.float16, tl.bfloat16, tl.float32, tl.float64]
SHAPES = [
    ((), ()),
    ((), (4,)),
    ((4,), ()),
    ((4,), (4,)),
    ((1,), (4,)),
    ((1,), ()),
    ((4, 1), (1, 4)),
    ((4, 4), (4, 1)),
    ((4,), (8,)),
    ((4,), (4, 4)),
]
NAMES = {name: row[0] for name, row in BINARY.items() if row[1] is not None}


def make(type_, shape, seed):
    kept = numpy_dtype(type_)
    generator = np.random.default_rng(seed)
    values = generator.integers(1, 100, shape or (1,))
    if kept.kind == "i" and not type_.is_int_unsigned():
        values = values - 50
        values[values == 0] = 3
    data = (values % 2 == 0) if kept == np.bool_ else values.astype(kept)
    return wrap(data, block_type(type_, shape) if shape else type_)


def outcome(function, *operands):
    """Type and values, or the kind of error."""
    try:
        with np.errstate(all="ignore"):
            result = function(*operands)
    except Exception as error:  # noqa: BLE001 - the errors of both ways are compared, whatever they are
        return type(error).__name__
    data = result.handle.data
    shape = tuple(result.type.shape) if result.type.is_block() else (1,)
    assert tuple(int(s) for s in result.shape) == (shape if result.type.is_block() else ())
    return str(result.type), repr(np.broadcast_to(data, shape).tolist())  # as text: nan equals nan


@pytest.mark.parametrize("name", NAMES)
def test_operators_on_tensors(name):
    fast = DIALECT.helpers[name]
    compared = 0
    general = operator_of(name)
    for left, right in itertools.product(TYPES, repeat=2):
        if left is not right and TYPES.index(right) % 3:
            continue  # unequal types take the general way on both sides; a third of them is enough
        for shape, other in SHAPES:
            a, b = make(left, shape, 1), make(right, other, 2)
            assert outcome(fast, a, b) == outcome(general, a, b), (left, right, shape, other)
            compared += 1
    assert compared > 300


@pytest.mark.parametrize("name", NAMES)
def test_operators_with_python_numbers(name):
    fast, general = DIALECT.helpers[name], operator_of(name)
    for type_, number in itertools.product(TYPES, [3, -3, 2.5, -2.0, True, 2**31, 2**40, 1e39]):
        a = make(type_, (4,), 3)
        for operands in ((a, number), (number, a), (a, tl.constexpr(number))):
            assert outcome(fast, *operands) == outcome(general, *operands), (type_, operands)


def operator_of(name):
    return lambda left, right: DIALECT.general(NAMES[name], left, right)


@pytest.mark.parametrize("offset", [tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32])
def test_pointer_offsets(offset):
    fast, general = DIALECT.helpers["Add"], operator_of("Add")
    for element in (tl.int1, tl.int8, tl.float16, tl.float64, tl.pointer_type(tl.int8)):
        pointer = tl.pointer_type(element)
        for shape, other in SHAPES:
            base = wrap(np.full(shape or (1,), 2**40, np.uint64), block_type(pointer, shape) if shape else pointer)
            step = make(offset, other, 4)
            assert outcome(fast, base, step) == outcome(general, base, step), (element, shape, other)
        for number in (5, -5, 2**40):
            base = wrap(np.full(1, 2**40, np.uint64), pointer)
            assert outcome(fast, base, number) == outcome(general, base, number)


def test_expanding_dimensions():
    value = make(tl.float32, (4, 4), 5)
    full = slice(None)
    for index in ((full, None, full), (None, full, full), (full, full, None)):
        fast = DIALECT.helpers["item"](value, index)
        general = tl.tensor.__getitem__.__wrapped__(value, index, _semantic=DIALECT.semantic)
        assert outcome(lambda x: x, fast) == outcome(lambda x: x, general)
    with pytest.raises((ValueError, IndexError)):
        DIALECT.helpers["item"](value, (full, 3))


def test_python_values_are_left_to_python():
    for name, python in NAMES.items():
        assert DIALECT.helpers[name](7, tl.constexpr(3)) == getattr(operator, f"__{python}__")(7, 3)
    assert DIALECT.helpers["Eq"](tl.float32, tl.float32) is True
    assert DIALECT.helpers["Is"](tl.constexpr(None), None)


@pytest.mark.parametrize("type_", [tl.float32, tl.pointer_type(tl.float32)], ids=str)
def test_types_can_be_copied_after_kernels_have_used_them(type_):
    """What fast paths keep on Triton's own types must not hinder programs that pass them to other processes."""
    used = block_type(type_, (8,))
    wrap(np.zeros(1, numpy_dtype(type_)), type_)
    for again in (pickle.loads(pickle.dumps(type_)), copy.deepcopy(type_)):
        assert again == type_
        assert block_type(again, (8,)) == used
