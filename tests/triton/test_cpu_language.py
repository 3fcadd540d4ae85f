"""What Python syntax means in kernels on the CPU: the compiler's meaning, not Python's."""

import collections

import pytest
import torch
import triton
import triton.language as tl

from iris_triton import interpreter


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def copy_kernel(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def test_masked_copy_over_several_programs():
    x, out = torch.randn(300), torch.zeros(512)
    copy_kernel[(5,)](x, out, 300, B=64)
    assert torch.equal(out[:300], x)
    assert not out[300:].any()


@triton.jit
def divide_kernel(out, a, b):
    tl.store(out, a // b)
    tl.store(out + 1, a % b)


@pytest.mark.parametrize(("a", "b"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (6, 3), (-6, 3)])
def test_integer_division_truncates_as_in_c(a, b):
    out = torch.zeros(2, dtype=torch.int32)
    divide_kernel[(1,)](out, a, b)
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    assert out.tolist() == [quotient, a - quotient * b]


@triton.jit
def square_kernel(out, n):
    tl.store(out, n * n)


@pytest.mark.parametrize(("n", "expected"), [(2**20, 0), (2**16 + 1, 131073), (2**33, 2**66 % 2**64)])
def test_integers_wrap_in_their_own_width(n, expected):
    out = torch.zeros(1, dtype=torch.int64)
    square_kernel[(1,)](out, n)
    assert out.item() == expected


@triton.jit
def loop_variable_kernel(out, n, B: tl.constexpr):
    total = tl.zeros((1,), tl.int64)
    for i in range(n):
        total += i.to(tl.int64)
    for j in tl.range(0, B, 2, num_stages=2):
        total += j.to(tl.int64) * 100
    for k in tl.static_range(B):
        total += k * 10000
    for m in range(3, 0, -1):
        total += m * 1000000
    tl.store(out + tl.arange(0, 1), total)


def test_loop_variables_are_tensors_and_static_ones_constants():
    out = torch.zeros(1, dtype=torch.int64)
    loop_variable_kernel[(1,)](out, 5, B=4)
    assert out.item() == 10 + 200 + 60000 + 6000000


@triton.jit
def loop_wrap_kernel(out, n):
    for i in range(n, n + 1):
        tl.store(out, i * i)


def test_loop_variables_wrap_as_int32():
    out = torch.zeros(1, dtype=torch.int64)
    loop_wrap_kernel[(1,)](out, 2**20)
    assert out.item() == 0


@triton.jit
def while_kernel(out, n):
    i = 0
    s = 0.0
    while i < n and s < 100.0:
        s += i
        i += 1
    tl.store(out, s)
    tl.store(out + 1, i.to(tl.float32))


def test_while_loop_over_scalars():
    out = torch.zeros(2)
    while_kernel[(1,)](out, 6)
    assert out.tolist() == [15, 6]


@triton.jit
def boolean_kernel(out, a, b, FLAG: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, ((i > a) and (i < b)).to(tl.int32))
    tl.store(out + B + i, ((i < a) or (i > b)).to(tl.int32))
    tl.store(out + 2 * B + i, (not (i > a)).to(tl.int32))
    tl.store(out + 3 * B + i, (a < i < b).to(tl.int32))
    if FLAG and a < 100 and not (b < a):
        tl.store(out + 4 * B, 7)
    if FLAG or a:
        tl.store(out + 4 * B + 1, 8)


def test_boolean_operators_on_blocks_scalars_and_constants():
    out = torch.zeros(34, dtype=torch.int32)
    boolean_kernel[(1,)](out, 2, 6, FLAG=True, B=8)
    i = torch.arange(8)
    expected = [(i > 2) & (i < 6), (i < 2) | (i > 6), ~(i > 2), (i > 2) & (i < 6)]
    assert torch.equal(out[:32].view(4, 8), torch.stack(expected).int())
    assert out[32:].tolist() == [7, 8]


@triton.jit
def ambiguous_kernel(out, B: tl.constexpr):
    if tl.arange(0, B) > 3:
        tl.store(out, 1)


def test_a_block_is_no_condition():
    with pytest.raises(TypeError, match=r"must be a scalar, not a block of shape \[8\]"):
        ambiguous_kernel[(1,)](ints(0), B=8)


@triton.jit
def ternary_kernel(out, a):
    x = 1.0 if a > 3 else 2.0
    tl.store(out, x)
    tl.store(out + 1, min(a, 3).to(tl.float32) + max(a, 3))


def test_conditional_expression_and_python_min_max():
    out = torch.zeros(2)
    ternary_kernel[(1,)](out, 5)
    assert out.tolist() == [1, 8]


@triton.jit
def constants_kernel(out, n: tl.constexpr, KIND: tl.constexpr, RUN_TIME: tl.constexpr):
    tl.store(out, int(n))
    tl.store(out + 1, float(n // 2))
    tl.store(out + 2, bool(n))
    B: tl.constexpr = int((n + 9) % 8)
    tl.store(out + 3 + tl.arange(0, B), 1.0)
    if RUN_TIME:
        tl.store(out, KIND(tl.program_id(0)))


def test_python_numbers_of_constants():
    out = torch.zeros(8)
    constants_kernel[(1,)](out, 3, None, False)
    assert out.tolist() == [3, 1, 1, 1, 1, 1, 1, 0]
    for kind in (int, float, bool):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) in a kernel converts constants only, not int32"):
            constants_kernel[(1,)](out, 3, kind, True)


@triton.jit
def early_kernel(x, out):
    if tl.load(x) > 3:
        return
    tl.store(out, 1.0)


def test_early_return():
    out = torch.zeros(2)
    early_kernel[(1,)](torch.tensor([5.0]), out)
    early_kernel[(1,)](torch.tensor([2.0]), out[1:])
    assert out.tolist() == [0, 1]


@triton.jit
def plus_minus(a, b, scale=2.0):
    return a + b, (a - b) * scale


@triton.jit
def apply(f: tl.constexpr, a, b):
    return f(a, b, scale=3.0)


@triton.jit
def nested_kernel(x, out):
    s, d = plus_minus(tl.load(x), tl.load(x + 1))
    s2, d2 = apply(plus_minus, s, d)
    tl.store(out, s)
    tl.store(out + 1, d)
    tl.store(out + 2, s2)
    tl.store(out + 3, d2)


def test_device_functions_with_defaults_keywords_and_as_constants():
    out = torch.zeros(4)
    nested_kernel[(1,)](torch.tensor([5.0, 3.0]), out)
    assert out.tolist() == [8, 4, 12, 12]


@triton.jit(noinline=True)
def not_inlined(a, k: tl.constexpr):
    return a * k


@triton.jit
def noinline_kernel(out, a):
    tl.store(out, not_inlined(a, 3))


def test_noinline_functions():
    out = ints(0)
    noinline_kernel[(1,)](out, 5)
    assert out.item() == 15


def make_kernel(constant, function):
    @triton.jit
    def kernel(out):
        tl.store(out, function(constant))

    return kernel


@triton.jit
def double(x):
    return x * 2


@triton.jit
def triple(x):
    return x * 3


def test_closures_keep_their_own_values():
    out = ints(0, 0)
    first, second = make_kernel(tl.constexpr(7), double), make_kernel(tl.constexpr(9), triple)
    first[(1,)](out)
    second[(1,)](out[1:])
    assert out.tolist() == [14, 27]


GLOBAL = tl.constexpr(5)


@triton.constexpr_function
def power_of_two(n):
    return 2 ** int(n)


@triton.jit
def constant_kernel(out, N: tl.constexpr, NAME: tl.constexpr, DT: tl.constexpr, D: tl.constexpr = GLOBAL):
    M: tl.constexpr = N * 2
    i = tl.arange(0, power_of_two(M - 4))
    tl.static_assert(M == 8 and NAME == "abc", "constants")
    tl.multiple_of(i, 8)
    tl.max_contiguous(i, 8)
    value = i + GLOBAL + D.value + tl.cdiv(N, 3) + N.value
    if NAME == "abc":
        value += 100
    tl.store(out + i, value.to(DT))


def test_constants_of_all_kinds():
    out = torch.zeros(16)
    constant_kernel[(1,)](out, N=4, NAME="abc", DT=tl.float32)
    assert torch.equal(out, torch.arange(16.0) + 5 + 5 + 2 + 4 + 100)


@triton.jit
def static_assert_kernel(x, N: tl.constexpr):
    tl.static_assert(N > 5, "too small")


def test_static_assert_fails_with_its_message():
    with pytest.raises(AssertionError, match="too small"):
        static_assert_kernel[(1,)](ints(0), N=3)


@triton.jit
def device_assert_kernel(x):
    tl.device_assert(tl.load(x) == 2, "must be two")


@triton.jit
def assert_kernel(x):
    assert tl.load(x) == 2, "must be two"


@pytest.mark.parametrize("kernel", [device_assert_kernel, assert_kernel])
def test_device_assert_fires(kernel):
    kernel[(1,)](ints(2))
    with pytest.raises(AssertionError, match="must be two"):
        kernel[(1,)](ints(1))


@triton.jit
def print_kernel(x):
    tl.device_print("value", tl.load(x))
    print("again", tl.load(x + 1))
    tl.static_print("static", 3)
    tl.device_print("hex", tl.load(x), hex=True)


def test_printing(capsys):
    print_kernel[(2,)](ints(41, 42))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pid (0, 0, 0) value: 41"
    assert lines[1] == "pid (0, 0, 0) again: 42"
    assert lines[2] == "static 3"
    assert lines[3] == "pid (0, 0, 0) hex: 0x29"
    assert lines[4].startswith("pid (1, 0, 0)")


Pair = collections.namedtuple("Pair", ["data", "scale"])


@triton.jit
def tuple_kernel(pair, triple, out):
    tl.store(out, tl.load(pair.data) * pair.scale)
    total = 0
    for item in tl.static_range(3):
        total += triple[item]
    tl.store(out + 1, total.to(tl.float32))
    a, (b, c) = triple[0], (triple[1], triple[2])
    tl.store(out + 2, (a * b * c).to(tl.float32))
    tl.store(out + 3, len(triple))


def test_tuple_and_namedtuple_arguments():
    out = torch.zeros(4)
    tuple_kernel[(1,)](Pair(torch.tensor([2.0]), 3), (1, 2, 4), out)
    assert out.tolist() == [6, 7, 8, 3]


@triton.jit
def argument_kernel(out, flag, nothing, real, HAS: tl.constexpr, n: tl.int64 = 3, k=4):
    tl.store(out, tl.where(flag, 1.0, 2.0))
    if nothing is None:
        tl.store(out + 1, real)
    if HAS is not None:
        tl.store(out + 2, (n << 33 >> 33).to(tl.float32) + k)


def test_bool_none_float_annotated_and_default_arguments():
    out = torch.zeros(3)
    argument_kernel[(1,)](out, True, None, 2.5, HAS=0)
    assert out.tolist() == [1, 2.5, 7]
    argument_kernel[(1,)](out, flag=False, nothing=None, real=1.5, HAS=0, k=5, n=2)
    assert out.tolist() == [2, 1.5, 7]


@triton.jit
def one_kernel(out, n, fixed, pair, typed: tl.int32, m=1):
    tl.static_assert(n == 1)
    tl.static_assert(m == 1)
    tl.static_assert(pair[0] == 1)
    tl.store(out, fixed.to(tl.float32) + typed.to(tl.float32) + pair[1].to(tl.float32))


def test_an_argument_that_is_one_is_a_constant():
    """As in compiled kernels: unless it is listed in do_not_specialize, has a type, is a bool or a float."""
    out = torch.zeros(1)
    kernel = triton.jit(one_kernel.fn, do_not_specialize=["fixed"])
    kernel[(1,)](out, 1, 1, (1, 2), 1)
    assert out.item() == 4
    for wrong in ((2, 1), (True, 1), (1.0, 1)):
        with pytest.raises(TypeError, match="static_assert needs a condition that depends on constants"):
            kernel[(1,)](out, wrong[0], 1, (1, 2), 1)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'to'") as caught:
        one_kernel[(1,)](out, 1, 1, (1, 2), 1)
    assert any("do_not_specialize" in note and "'fixed'" in note for note in caught.value.__notes__)


@triton.jit
def grid_kernel(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(axis=2)
    nx, ny = tl.num_programs(0), tl.num_programs(1)
    order = tl.atomic_add(out, 1)
    tl.store(out + 1 + x + nx * (y + ny * z), order)


def test_programs_start_with_x_fastest():
    out = torch.zeros(1 + 24, dtype=torch.int32)
    grid_kernel[(2, 3, 4)](out)
    assert out[1:].tolist() == list(range(24))


@triton.jit
def type_kernel(x, out):
    v = tl.load(x)
    if x.dtype.element_ty == tl.float32:
        tl.store(out, 1)
    if v.dtype.is_floating() and isinstance(v, tl.tensor):
        tl.store(out + 1, v.dtype.primitive_bitwidth)
    i = tl.arange(0, 8)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + 2, i.shape[0] * 10 + i.shape[1])
    tl.store(out + 3, tl.sum(i.T.trans() == i))


def test_types_and_shapes_can_be_asked():
    out = ints(0, 0, 0, 0)
    type_kernel[(1,)](torch.ones(1), out)
    assert out.tolist() == [1, 32, 84, 32]


def undecorated(x):
    return x + 1


@triton.jit
def undecorated_kernel(out):
    tl.store(out, undecorated(1))


def test_undecorated_functions_are_refused_as_by_the_compiler():
    with pytest.raises(NotImplementedError, match=r"undecorated.*@triton\.jit"):
        undecorated_kernel[(1,)](ints(0))


@triton.jit
def recursive(n):
    return recursive(n + 1)


@triton.jit
def recursion_kernel(out, n):
    tl.store(out, recursive(n))


def test_endless_recursion_is_a_recursion_error():
    with pytest.raises(RecursionError):
        recursion_kernel[(1,)](ints(0), 3)


@triton.jit
def failing(x):
    return x + undefined_name  # noqa: F821


@triton.jit
def failing_kernel(out):
    tl.store(out, failing(1))


def test_errors_point_into_the_kernel_and_name_it():
    with pytest.raises(NameError) as info:
        failing_kernel[(3, 2)](ints(0))
    (note,) = info.value.__notes__
    assert note.startswith("in kernel 'failing_kernel', program (0, 0, 0) of grid (3, 2, 1), at ")
    assert note.endswith(f"test_cpu_language.py:{failing.starting_line_number + 2}")
    frames = [(entry.path.name, entry.lineno + 1) for entry in info.traceback]
    here = "test_cpu_language.py"
    line = failing.starting_line_number
    assert (here, line + 2) in frames
    assert (here, failing_kernel.starting_line_number + 2) in frames


@triton.jit
def annotated_pointer_kernel(x: tl.pointer_type(tl.int32), out: "*fp32", n: "i64"):  # noqa: F722, F821
    tl.store(out, (tl.load(x) + n).to(tl.float32))


def test_annotations_are_not_evaluated_in_the_kernel():
    out = torch.zeros(1)
    annotated_pointer_kernel[(1,)](ints(3), out, 4)
    assert out.item() == 7


@triton.jit
def const_kernel(x: tl.const, out):
    tl.store(x, 1)


def test_const_pointers_cannot_be_stored_to():
    with pytest.raises(ValueError, match="constant pointer"):
        const_kernel[(1,)](ints(0), ints(0))
