"""Every device function compiles for every GPU target, and its assembly has what it must have."""

import re

import pytest
from compile_language import compile_cases
from targets import case_targets

from iris_core.types import DeviceType
from iris_triton import language
from iris_triton.context import DeviceContext
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for

CASES = {case.name: case for case in compile_cases()}
KINDS = {"cuda": DeviceType.CUDA, "hip": DeviceType.HIP}


RARE = {f"collective-{name}" for name in ("pull-bytes", "pull-nothing", "reduce-direct", "push-members", "push-tiles")}
RARE.add("operation-reduce-rows")
"""Kernels that take long and are compiled in other forms as well."""


def kernel_of(name):
    """Cases with the same code of a vendor's own share the targets: what differs is an operation, type or order."""
    operation, *how = name.split("-")
    if operation in ("collective", "operation", "tile"):
        return CASES[name].kernel
    if operation.startswith("atomic_"):
        return operation
    return operation, *(how[1:-1] if "hint=" in name else how[:1])


@pytest.mark.parametrize(("name", "target"), case_targets(CASES, kernel=kernel_of, rare=RARE))
def test_assembly(name, target):
    case = CASES[name]
    text = assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))
    expected = case.expect[KINDS[TARGETS[target].backend]]
    assert expected
    for pattern in expected:
        assert re.search(pattern, text), f"{name} for {target} lacks {pattern}:\n{text}"


def test_case_names_are_unique():
    assert len(CASES) == len(compile_cases())


@pytest.mark.parametrize("form", ["function", "method"])
@pytest.mark.parametrize("function", language.__all__)
def test_every_device_function_has_a_case(function, form):
    assert [name for name in CASES if name.startswith(f"{function}-") and f"-{form}" in name]


def test_methods_are_the_device_functions():
    methods = {name for name in vars(DeviceContext) if not name.startswith("_")}
    assert methods >= set(language.__all__) | {"initialize", "from_tensor"}
