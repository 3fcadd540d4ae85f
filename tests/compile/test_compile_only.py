"""The machinery that compiles without a GPU."""

import ast
import json
import os
import pathlib

import pytest
import torch
import triton
import triton.language as tl
from compile_language import compile_cases
from tables import table
from triton.runtime import driver

from iris_triton.testing.compile_only import TARGETS, assembly, compile_for


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


def _compile_intrinsics(errors, found):
    """Write what compilers print into a file, and the assembly for each target into another one."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    case = next(case for case in compile_cases() if case.name == "intrinsics")
    texts = {each: assembly(compile_for(case.kernel, case.args, case.kwargs, each)) for each in TARGETS}
    with open(found, "w") as file:
        json.dump(texts, file)


def test_intrinsics_have_no_assembly_of_another_vendor(server, tmp_path):
    # In a process of its own: assembly of the wrong vendor may end the process, or only print and be dropped.
    errors, found = tmp_path / "errors", tmp_path / "found"
    process = server.Process(target=_compile_intrinsics, args=(errors, found))
    process.start()
    process.join()
    assert process.exitcode == 0, errors.read_text()
    assert "error" not in errors.read_text()
    texts = json.loads(found.read_text())
    assert list(texts) == list(TARGETS)
    for target, text in texts.items():
        foreign = ("s_memrealtime", "hwreg") if target == "sm_90" else ("%globaltimer", "%smid")
        assert not [word for word in foreign if word in text], target


def test_no_default_of_a_device_function_is_text():
    """Triton 3.6 takes numbers as defaults, and refuses a string where the function is called."""
    found = []
    for path in pathlib.Path(__file__).resolve().parents[2].glob("iris_*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                texts = [each for each in node.args.defaults if isinstance(getattr(each, "value", None), str)]
                found += [f"{path}: {node.name}"] * bool(texts)
    assert found == []
