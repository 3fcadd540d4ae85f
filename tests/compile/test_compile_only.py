"""The machinery that compiles without a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from recording import record
from tables import table
from triton.runtime import driver

from iris_triton import interpreter
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for

# its path has the tests' helpers
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
MEASURE = """
import json
from compile_language import compile_cases
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for
case = next(case for case in compile_cases() if case.name == "intrinsics")
print(json.dumps({each: assembly(compile_for(case.kernel, case.args, case.kwargs, each)) for each in TARGETS}))
"""


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def broken(x):
    tl.store(x, undefined_name)  # noqa: F821


@table("target, text", [("sm_90", ".target sm_90a"), ("gfx942", "gfx942"), ("gfx950", "gfx950")])
def test_compiles_for_the_target_named_and_restores_the_driver(target, text):
    before = driver._active
    assert text in assembly(compile_for(add_one, (torch.float32, 100), {"BLOCK": 64}, target))
    assert driver._active is before
    with pytest.raises(triton.CompilationError):
        compile_for(broken, (torch.float32,), {}, target)
    assert driver._active is before
    with pytest.raises(KeyError, match="gfx1"):
        compile_for(add_one, (torch.float32, 100), {"BLOCK": 64}, "gfx1")


def test_record_compiles_what_is_launched_and_launches_it():
    x = torch.zeros(100)
    with record() as compilations:
        add_one[(2,)](x, 100, BLOCK=64)
        add_one[(2,)](x, 100, BLOCK=64)
    assert x.tolist() == [2.0] * 100
    assert [(c.kernel, c.target) for c in compilations] == 2 * [("add_one", target) for target in TARGETS]
    assert "st.global" in assembly(compilations[0].compiled)
    count = len(compilations)
    add_one[(2,)](x, 100, BLOCK=64)
    assert len(compilations) == count
    assert interpreter.is_enabled()


def test_record_survives_disabling_the_executor_within_and_shows_what_does_not_compile():
    one = {"sm_90": TARGETS["sm_90"]}
    interpreter.enable()
    with record(one), pytest.raises(triton.CompilationError):
        broken[(1,)](torch.zeros(1))
    try:
        with record(one):
            interpreter.disable()
        assert triton.runtime.jit.JITFunction.run.__module__ == "triton.runtime.jit"
    finally:
        interpreter.enable()


def test_intrinsics_have_no_assembly_of_another_vendor():
    # In a process of its own: assembly of the wrong vendor may end the process, or only print and be dropped.
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    texts = json.loads(done.stdout)
    assert list(texts) == list(TARGETS)
    for target, text in texts.items():
        foreign = ("s_memrealtime", "hwreg") if target == "sm_90" else ("%globaltimer", "%smid")
        assert not [word for word in foreign if word in text], target
