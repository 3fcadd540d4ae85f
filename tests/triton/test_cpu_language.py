"""What Python syntax means in kernels on the CPU: the compiler's meaning, not Python's."""

import collections

import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import table

GLOBAL = tl.constexpr(5)
Pair = collections.namedtuple("Pair", ["data", "scale"])


ARITHMETIC = "tl.store(out, a // b)\ntl.store(out + 1, a % b)\ntl.store(out + 2, a * a)"
LOOPS = """
total = tl.zeros((1,), tl.int64)
for i in range(a):
    total += i.to(tl.int64)
for j in tl.range(0, 4, 2, num_stages=2):
    total += j.to(tl.int64) * 100
for k in tl.static_range(4):
    total += k * 10000
for m in range(3, 0, -1):
    total += m * 1000000
tl.store(out + tl.arange(0, 1), total)
for wide in range(b, b + 1):
    tl.store(out + 1, wide * wide)  # of int32
count = 0
s = 0.0
while count < a and s < 100.0:
    s += count
    count += 1
tl.store(out + 2, s)
tl.store(out + 3, count.to(tl.float32))
"""
BOOLEANS = """
i = tl.arange(0, 8)
tl.store(out + i, ((i > a) and (i < b)).to(tl.int32))
tl.store(out + 8 + i, ((i < a) or (i > b)).to(tl.int32))
tl.store(out + 16 + i, (not (i > a)).to(tl.int32))
tl.store(out + 24 + i, (a < i < b).to(tl.int32))
if FLAG and a < 100 and not (b < a):
    tl.store(out + 32, 7)
if FLAG or a:
    tl.store(out + 33, 8)
"""
CHOICES = """
yes = True
x = 1.0 if a > 3 else 2.0
tl.store(out, x * yes.to(tl.float32))
tl.store(out + 1, min(a, 3).to(tl.float32) + max(a, 3))
if a > 3:
    return
tl.store(out + 2, 1.0)
"""
NUMBERS = """
tl.store(out, int(n))
tl.store(out + 1, float(n // 2))
tl.store(out + 2, bool(n))
B: tl.constexpr = int((n + 9) % 8)
tl.store(out + 3 + tl.arange(0, B), 1.0)
"""
FUNCTIONS = """
s, d = plus_minus(a, b)
s2, d2 = apply(plus_minus, s, d)
tl.store(out, s)
tl.store(out + 1, d)
tl.store(out + 2, s2)
tl.store(out + 3, d2)
tl.store(out + 4, not_inlined(a, 3))
"""
CONSTANTS = """
M: tl.constexpr = N * 2
i = tl.arange(0, power_of_two(M - 4))
tl.static_assert(M == 8 and NAME == "abc", "constants")
tl.multiple_of(i, 8)
tl.max_contiguous(i, 8)
value = i + GLOBAL + D.value + tl.cdiv(N, 3) + N.value
if NAME == "abc":
    value += 100
tl.store(out + i, value.to(DT))
"""
TUPLES = """
tl.store(out, tl.load(pair.data) * pair.scale)
total = 0
for item in tl.static_range(3):
    total += triple[item]
tl.store(out + 1, total.to(tl.float32))
a, (b, c) = triple[0], (triple[1], triple[2])
tl.store(out + 2, (a * b * c).to(tl.float32))
tl.store(out + 3, len(triple))
"""
ARGUMENTS = """
tl.store(out, tl.where(flag, 1.0, 2.0))
if nothing is None:
    tl.store(out + 1, real)
if HAS is not None:
    tl.store(out + 2, (n << 33 >> 33).to(tl.float32) + k)
"""
TYPES = """
v = tl.load(x)
if x.dtype.element_ty == tl.float32:
    tl.store(out, 1)
if v.dtype.is_floating() and isinstance(v, tl.tensor):
    tl.store(out + 1, v.dtype.primitive_bitwidth)
i = tl.arange(0, 8)[:, None] + tl.arange(0, 4)[None, :]
tl.store(out + 2, i.shape[0] * 10 + i.shape[1])
tl.store(out + 3, tl.sum(i.T.trans() == i))
"""
MANY = "out, flag, nothing, real, HAS: tl.constexpr, n: tl.int64 = 3, k=4"
CONSTANT = "out, N: tl.constexpr, NAME: tl.constexpr, DT: tl.constexpr, D: tl.constexpr = GLOBAL"
ANNOTATED = "out: '*fp64', x: tl.pointer_type(tl.int32), n: 'i64'"


plus_minus = kernel_of(triton.jit, "a, b, scale=2.0", "return a + b, (a - b) * scale")
apply = kernel_of(triton.jit, "f: tl.constexpr, a, b", "return f(a, b, scale=3.0)", tl=tl)
not_inlined = kernel_of(triton.jit(noinline=True), "a, k: tl.constexpr", "return a * k", tl=tl)
add = kernel_of(triton.jit, "a, b", "return a + b")


def make_closure(constant, function):
    @triton.jit
    def kernel(out, a):
        tl.store(out, function(a, constant))

    return kernel


@triton.constexpr_function
def power_of_two(n):
    return 2 ** int(n)


USED = {"plus_minus": plus_minus, "apply": apply, "not_inlined": not_inlined, "power_of_two": power_of_two}


@table("parameters, text, given, expected", [
    *(("out, a, b", ARITHMETIC, *each) for each in (
        ((7, 2), [3, 1, 49]), ((-7, 2), [-3, -1, 49]), ((7, -2), [-3, 1, 49]), ((-7, -2), [3, -1, 49]),
        ((-6, 3), [-2, 0, 36]), ((2**20, 3), [349525, 1, 0]), ((2**16 + 1, 2), [32768, 1, 131073]),
        ((2**33 + 1, 2), [2**32, 1, 2**34 + 1]),
    )),
    ("out, a, b", LOOPS, (6, 2**20), [15 + 200 + 60000 + 6000000, 0, 15, 6]),
    ("out, a, b, FLAG: tl.constexpr", BOOLEANS, (2, 6, True),
     [int(each) for each in "0001110011000001111000000001110078"]),
    ("out, a", CHOICES, (5,), [1, 8, 0]),
    ("out, a", CHOICES, (2,), [2, 5, 1]),
    ("out, n: tl.constexpr", NUMBERS, (3,), [3, 1, 1, 1, 1, 1, 1, 0]),
    ("out, a, b", FUNCTIONS, (5.0, 3.0), [8, 4, 12, 12, 15]),
    ("", make_closure(tl.constexpr(7), not_inlined), (2,), [14]),
    ("", make_closure(tl.constexpr(9), add), (2,), [11]),
    (CONSTANT, CONSTANTS, (4, "abc", tl.float32), [116.0 + i for i in range(16)]),
    ("out, pair, triple", TUPLES, (Pair(torch.tensor([2.0]), 3), (1, 2, 4)), [6, 7, 8, 3]),
    (MANY, ARGUMENTS, (True, None, 2.5, 0), [1, 2.5, 7]),
    (MANY, ARGUMENTS, (False, None, 1.5, 0, 2, 5), [2, 1.5, 7]),
    ("out, x", TYPES, (torch.ones(1),), [1, 32, 84, 32]),
    (ANNOTATED, "tl.store(out, (tl.load(x) + n).to(tl.float32))", (torch.tensor([3], dtype=torch.int32), 4), [7]),
])  # fmt: skip
def test_what_python_means(parameters, text, given, expected):
    kernel = kernel_of(triton.jit, parameters, text, tl=tl, GLOBAL=GLOBAL, **USED) if parameters else text
    out = torch.zeros(len(expected), dtype=torch.float64)
    kernel[(1,)](out, *given)
    assert out.tolist() == expected


@triton.jit
def places(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(axis=2)
    nx, ny = tl.num_programs(0), tl.num_programs(1)
    tl.store(out + 1 + x + nx * (y + ny * z), tl.atomic_add(out, 1))


def test_programs_start_with_x_fastest():
    out = torch.zeros(1 + 24, dtype=torch.int32)
    places[(2, 3, 4)](out)
    assert out[1:].tolist() == list(range(24))


@triton.jit
def one(out, n, fixed, pair, typed: tl.int32, m=1):
    tl.static_assert(n == 1)
    tl.static_assert(m == 1)
    tl.static_assert(pair[0] == 1)
    tl.store(out, fixed.to(tl.float32) + typed.to(tl.float32) + pair[1].to(tl.float32))


def test_an_argument_that_is_one_is_a_constant():
    """As in compiled kernels: unless it is listed in do_not_specialize, has a type, is a bool or a float."""
    out = torch.zeros(1)
    kernel = triton.jit(one.fn, do_not_specialize=["fixed"])
    kernel[(1,)](out, 1, 1, (1, 2), 1)
    assert out.item() == 4
    for n in (2, True, 1.0):
        with pytest.raises(TypeError, match="a condition that depends on constants"):
            kernel[(1,)](out, n, 1, (1, 2), 1)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'to'") as caught:
        one[(1,)](out, 1, 1, (1, 2), 1)
    assert any("do_not_specialize" in note and "'fixed'" in note for note in caught.value.__notes__)


def undecorated(x):
    return x + 1


@triton.jit
def recursive(n):
    return recursive(n + 1)


@table("parameters, text, error, said", [
    ("x", "tl.store(x, 1 if tl.arange(0, 8) > 3 else 2)", TypeError, r"must be a scalar, not a block of shape \[8\]"),
    ("x", "tl.static_assert(x is None, 'too small')", AssertionError, "too small"),
    ("x", "tl.device_assert(tl.load(x) == 2, 'must be two')", AssertionError, "must be two"),
    ("x", "assert tl.load(x) == 2, 'must be two'", AssertionError, "must be two"),
    ("x", "tl.store(x, undecorated(1))", NotImplementedError, r"undecorated.*@triton\.jit"),
    ("x", "tl.store(x, recursive(tl.load(x)))", RecursionError, "depth"),
    ("x: tl.const", "tl.store(x, 1)", ValueError, "constant pointer"),
    *(("x", f"tl.store(x, {kind}(tl.program_id(0)))", TypeError, rf"{kind}\(\) in a kernel converts constants only")
      for kind in ("int", "float", "bool")),
])  # fmt: skip
def test_what_is_refused_as_by_the_compiler(parameters, text, error, said):
    kernel = kernel_of(triton.jit, parameters, text, tl=tl, undecorated=undecorated, recursive=recursive)
    with pytest.raises(error, match=said):
        kernel[(1,)](torch.ones(1, dtype=torch.int32))
    if said == "must be two":
        kernel[(1,)](torch.tensor([2]))


@triton.jit
def print_all(x):
    tl.device_print("value", tl.load(x))
    print("again", tl.load(x + 1))
    tl.static_print("static", 3)
    tl.device_print("hex", tl.load(x), hex=True)


def test_printing(capsys):
    print_all[(2,)](torch.tensor([41, 42], dtype=torch.int32))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["pid (0, 0, 0) value: 41", "pid (0, 0, 0) again: 42", "static 3", "pid (0, 0, 0) hex: 0x29"]
    assert lines[4].startswith("pid (1, 0, 0)")


@triton.jit
def failing(x):
    return x + undefined_name  # noqa: F821


@triton.jit
def failing_kernel(out):
    tl.store(out, failing(1))


def test_errors_point_into_the_kernel_and_name_it():
    with pytest.raises(NameError) as info:
        failing_kernel[(3, 2)](torch.zeros(1))
    (note,) = info.value.__notes__
    here, line = "test_cpu_language.py", failing.starting_line_number + 2
    assert note.startswith("in kernel 'failing_kernel', program (0, 0, 0) of grid (3, 2, 1), at ")
    assert note.endswith(f"{here}:{line}")
    frames = [(entry.path.name, entry.lineno + 1) for entry in info.traceback]
    assert {(here, line), (here, failing_kernel.starting_line_number + 2)} <= set(frames)
