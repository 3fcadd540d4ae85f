"""Kernels on the CPU: what Python syntax means there, what launches divert and refuse, autotuning, CPU entries."""

import collections
import importlib.util
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import raises, says, table

from iris_core.errors import UnsupportedError
from iris_triton import _compat, interpreter
from iris_triton.interpreter import entries
from iris_triton.interpreter import launch as launch_module

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
    ("out, a", CHOICES, (5,), [1, 8, 0]), ("out, a", CHOICES, (2,), [2, 5, 1]),
    ("out, n: tl.constexpr", NUMBERS, (3,), [3, 1, 1, 1, 1, 1, 1, 0]),
    ("out, a, b", FUNCTIONS, (5.0, 3.0), [8, 4, 12, 12, 15]),
    ("", make_closure(tl.constexpr(7), not_inlined), (2,), [14]), ("", make_closure(tl.constexpr(9), add), (2,), [11]),
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
        with raises(TypeError, "kernel.condition"):
            kernel[(1,)](out, n, 1, (1, 2), 1)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'to'") as caught:
        one[(1,)](out, 1, 1, (1, 2), 1)
    assert any("do_not_specialize" in note and "'fixed'" in note for note in caught.value.__notes__)


def undecorated(x):
    return x + 1


@triton.jit
def recursive(n):
    return recursive(n + 1)


@table("parameters, text, error, key", [
    ("x", "tl.store(x, 1 if tl.arange(0, 8) > 3 else 2)", TypeError, "kernel.scalar"),
    *(("x", text, AssertionError, "names") for text in (
        "tl.static_assert(x is None, 'is not two')", "tl.device_assert(tl.load(x) == 2, 'is not two')",
        "assert tl.load(x) == 2, 'is not two'")),
    ("x", "tl.store(x, undecorated(1))", NotImplementedError, "kernel.undecorated"),
    ("x", "tl.store(x, recursive(tl.load(x)))", RecursionError, "any"),
    ("x: tl.const", "tl.store(x, 1)", ValueError, "kernel.const"),
    *(("x", f"tl.store(x, {kind}(tl.program_id(0)))", TypeError, "kernel.converts")
      for kind in ("int", "float", "bool")),
])  # fmt: skip
def test_what_is_refused_as_by_the_compiler(parameters, text, error, key):
    kernel = kernel_of(triton.jit, parameters, text, tl=tl, undecorated=undecorated, recursive=recursive)
    with raises(error, key, name="is not two"):
        kernel[(1,)](torch.ones(1, dtype=torch.int32))
    if "== 2" in text:
        kernel[(1,)](torch.tensor([2]))


@triton.jit
def print_all(x):
    tl.device_print("value", tl.load(x))
    print("again", tl.load(x + 1))
    tl.static_print("static", 3)
    tl.device_print("hex", tl.load(x), hex=True)


def test_printing_in_programs_with_x_fastest(capsys):
    print_all[(2, 3, 4)](torch.tensor([41, 42], dtype=torch.int32))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["pid (0, 0, 0) value: 41", "pid (0, 0, 0) again: 42", "static 3", "pid (0, 0, 0) hex: 0x29"]
    programs = [f"pid ({x}, {y}, {z})" for z in range(4) for y in range(3) for x in range(2)]
    assert [line.partition(" value")[0] for line in lines[::4]] == programs


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


@triton.jit
def fill(out, n, value=1.0, B: tl.constexpr = 64):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, value, mask=i < n)


pair = kernel_of(triton.jit, "x, out", "tl.store(out, tl.load(x))", tl=tl)


def test_forms_of_launches():
    out, leaf = torch.zeros(100), torch.zeros(4, requires_grad=True)
    for value, launch in enumerate((
        lambda: fill[(2,)](out, 100),
        lambda: fill[2,](out, n=100, value=2),
        lambda: fill[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](out, 100, 3.0, B=32, num_warps=4, num_stages=2),
        lambda: fill.run(out, 100, 4.0, grid=(2, 1, 1), warmup=False),
        lambda: fill[[2]](out, np.int64(100), np.float32(5)),
    ), 1):  # fmt: skip
        launch()
        assert (out == value).all()
    for grid in ((0,), (2, 0), (4, 4, 0)):
        fill[grid](out, 100, 9)
    assert (out == 5).all()
    fill[(1,)](leaf, 4)
    assert (leaf == 1).all()
    pair[(1,)](triton.reinterpret(torch.tensor([1, 2], dtype=torch.int8), tl.uint8), out)
    assert out[0] == 1


@table("grid, args, named, error, key", [
    ((1,), (), {}, TypeError, "missing"), ((1,), (1, 2), {"nn": 3}, TypeError, "unexpected"),
    ((1,), (object(), 2), {}, TypeError, "tensor"), ((1,), (1, "text"), {}, TypeError, "number"),
    ((1,), (1, 2**64), {}, ValueError, "64 bits"), ((), (1, 4), {}, ValueError, "dimensions"),
    ((-1,), (1, 4), {}, ValueError, "negative"), ((1.5,), (1, 4), {}, TypeError, "integers"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(grid, args, named, error, key):
    tensor = torch.zeros(4)
    with raises(error, f"kernel.{key}"):
        fill[grid](*(tensor if a == 1 and i == 0 else a for i, a in enumerate(args)), **named)
    assert not tensor.any()


def test_tensors_on_different_devices_are_refused():
    with raises(ValueError, name="meta"):
        pair[(1,)](torch.zeros(4), torch.zeros(4, device="meta"))


def test_enabling_is_idempotent_and_disabling_restores(monkeypatch):
    original = launch_module._originals[_compat.JITFunction]
    interpreter.enable()
    assert interpreter.is_enabled()
    assert launch_module._originals[_compat.JITFunction] is original
    interpreter.disable()
    interpreter.disable()
    assert not interpreter.is_enabled()
    assert _compat.JITFunction.run is original
    with warnings.catch_warnings():  # the installed Triton is in the table
        warnings.simplefilter("error")
        interpreter.enable()
    test_forms_of_launches()
    interpreter.disable()
    monkeypatch.setattr(_compat.triton, "__version__", "9.4.1")
    with pytest.warns(RuntimeWarning, match=says("names", "kernel.versions", name="9.4.1")):
        interpreter.enable()


def test_hooks_run_before_the_kernel_with_its_arguments():
    as_given = triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["out"])
    hooked, out, seen = kernel_of(as_given, "out, n", "tl.store(out, n + 1)", tl=tl), torch.zeros(4), []
    hooked.add_pre_run_hook(lambda *args, **kwargs: seen.append((args, kwargs, out.clone())))
    hooked[(1,)](out, n=1)
    (((first,), named, before),) = seen
    assert first is out
    assert (named, before.tolist(), out.tolist()) == ({"n": 1}, [0] * 4, [2, 0, 0, 0])


@triton.autotune(
    configs=[triton.Config({"B": 32}, num_warps=2, pre_hook=lambda of: of["out"].zero_()), triton.Config({"B": 64})],
    key=["n"],
    prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: configs},
)  # fmt: skip
@triton.heuristics({"WHOLE": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def tuned(x, out, n, B: tl.constexpr, WHOLE: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(out + n, B + 1000 * WHOLE)


def test_autotuner_takes_the_first_configuration_and_its_hook():
    x, out = torch.randn(100), torch.ones(101)
    tuned[lambda meta: (triton.cdiv(100, meta["B"]),)](x, out, 100)
    assert torch.equal(out[:100], x)
    assert out[100] == 128032
    assert tuned.best_config.kwargs == {"B": 32}


@triton.jit
def assembly(out, text: tl.constexpr):
    tl.store(out, tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1))


many_types = kernel_of(triton.jit, "a, b, c, d, e", "return a")


@triton.jit
def call_many_types(p, flag, real, out):
    half = tl.load(p).to(tl.bfloat16)
    x, y, z, w = many_types(half, flag, real, p, tl.cast(200, tl.uint8))
    tl.store(out, x)
    tl.store(out + 1, y.to(tl.float32))
    tl.store(out + 2, z.to(tl.float32))
    tl.store(out + 3, w)
    tl.static_assert(x.dtype == tl.float32 and y.dtype == tl.int64 and z.dtype == tl.int1 and w.dtype == tl.float32)


def test_values_that_entries_get_and_give():
    source, out = torch.tensor([1.5]), torch.zeros(4)

    @interpreter.cpu_entry(many_types)
    def entry(program, a, b, c, d, e):
        assert b is np.True_
        assert (a, c, d, e) == (1.5, 2.5, source.data_ptr(), 200)
        assert (a.dtype, c.dtype, d.dtype, e.dtype) == (np.float32, np.float32, np.uint64, np.uint8)
        return a * 2, 2**40, True, 0.5

    call_many_types[(1,)](source, True, 2.5, out)
    assert out.tolist() == [3, 2.0**40, 1, 0.5]


@triton.jit
def timers(out):
    pid = tl.program_id(0)
    start = tl.extra.cuda.globaltimer()
    tl.store(out + pid * 4, tl.extra.cuda.smid().to(tl.int64))
    tl.store(out + pid * 4 + 1, tl.extra.cuda.globaltimer() - start)
    asm: tl.constexpr = "mov.u64 $0, %globaltimer;"
    block = tl.inline_asm_elementwise(asm, "=l,r", [tl.arange(0, 4)], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out + pid * 4 + 2, tl.min(block - start, axis=0))


def test_assembly_that_is_built_in():
    out = torch.zeros(3, 4, dtype=torch.int64)
    timers[(3,)](out)
    assert out[:, 0].tolist() == [0, 1, 2]
    assert ((out[:, 1:3] >= 0) & (out[:, 1:3] < 10**9)).all()
    for text in ("fence.acq_rel.sys; mov.u32 $0, 0;", "fence.proxy.async; mov.u32 $0, 0;", "mov.u32 $0, %smid;"):
        out = torch.ones(1, dtype=torch.int32)
        assembly[(1,)](out, text)
        assert out.item() == 0
    for text in (
        "again: ld.acquire.sys.global.u32 $0, [$1]; setp.ne.u32 p, $0, 1; @p bra again; fence.proxy.async;",
        "fence.acq_rel.sys; red.release.sys.global.add.u32 [$1], 1;",
        "mov.u64 t, %globaltimer; sub.u64 $0, t, $1;",
        "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
    ):
        with pytest.raises(UnsupportedError):
            assembly[(1,)](out, text)


SCRIPT = """
import torch, triton, triton.language as tl
from iris_triton import interpreter
import iris_triton._compat
@triton.jit
def helper(x):
    return tl.sum(tl.where(x > 1, x, tl.zeros_like(x)), axis=0)
@triton.jit
def kernel(x, out, N: tl.constexpr):
    tl.store(out, helper(tl.load(x + tl.arange(0, N)).to(tl.bfloat16)).to(tl.float32))
@triton.jit
def waits(flag):
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            pass
    tl.store(flag, 1)
interpreter.enable()
out = torch.zeros(1)
kernel[(1,)](torch.arange(4.0), out, N=4)
assert out.item() == 5, out
assert not triton.knobs.runtime.interpret
waits[(8,)](torch.zeros(1, dtype=torch.int32))
print("fine")
"""


def test_triton_interpret_has_no_effect_and_waiting_programs_let_the_process_end(tmp_path):
    script, variables = tmp_path / "script.py", {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    script.write_text(SCRIPT)
    how = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run([sys.executable, script], env=os.environ | variables, **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_triton_that_lacks_something_is_refused_with_the_versions_that_fit(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    spec = importlib.util.spec_from_file_location("iris_triton._compat_again", _compat.__file__)
    with raises(UnsupportedError, "kernel.versions"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_language_that_nothing_loaded_runs_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(entries.FACTORIES, "gluon", raising=False)
    gluon = pytest.importorskip("triton.experimental.gluon")

    @gluon.jit
    def gluon_kernel(x):
        pass

    with raises(UnsupportedError, name="gluon_kernel"):
        gluon_kernel[(1,)](torch.zeros(1))
