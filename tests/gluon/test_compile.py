"""Every device function compiles for every GPU target, and its assembly has what it must have."""

import re

import jobs_atomics
import jobs_sync
import pytest
import torch
from gluon_cases import compile_cases
from gluon_kernels import kernels_of
from jobs_sync import BLOCK
from targets import case_targets

from iris_core.types import DeviceType
from iris_gluon import IrisDeviceCtx, language
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for

CASES = {case.name: case for case in compile_cases()}
KINDS = {"cuda": DeviceType.CUDA, "hip": DeviceType.HIP}
INT32, INT64 = torch.int32, torch.int64


TILES = [name for name in CASES if name.startswith("tile-")]
METHODS = [name for name in CASES if name.endswith("-method")]
SELDOM = {*TILES} - {*TILES[::4]} | {*METHODS} - {*METHODS[::3]}
SELDOM |= {"collective-gluon-push-landing", "collective-gluon-two-shot-reading"}  # others land, or read
"""Compiled in this form with --exhaustive: tests/compile has the same functions in Triton."""


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.exhaustive])
        if each.values[0] in SELDOM
        else each
        for each in case_targets(CASES, each_vendor=False)
    ],
)
def test_assembly(name, target):
    case = CASES[name]
    text = assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))
    expected = case.expect[KINDS[TARGETS[target].backend]]
    assert expected
    for pattern in expected:
        assert re.search(pattern, text), f"{name} for {target} lacks {pattern}:\n{text}"


@pytest.mark.parametrize("form", ["function", "method"])
@pytest.mark.parametrize("function", language.__all__)
def test_every_device_function_has_a_case(function, form):
    assert [name for name in CASES if name.startswith(f"{function}-") and f"-{form}" in name]


def test_methods_are_the_device_functions():
    methods = {name for name in vars(IrisDeviceCtx) if not name.startswith("_")}
    assert methods >= set(language.__all__) | {"initialize"}


KERNELS = kernels_of(jobs_sync) | kernels_of(jobs_atomics)

# What the tests launch on GPUs compiles for those, so that no time there is lost with that.
LAUNCHED = {
    "ring": (KERNELS["ring"], (INT32, INT64, INT32, INT64, 1, 4, 5, "store"), {"BLOCK": BLOCK}),
    "ring put_signal": (KERNELS["ring"], (INT32, INT64, INT32, INT64, 0, 4, 5, "put_signal"), {"BLOCK": BLOCK}),
    "count": (KERNELS["count_signals"], (INT64, INT64, 0, 4, 5), {}),
    "compare": (KERNELS["compare"], (INT32, 5, INT32, 10**9), {"cmp": "ne"}),
    "handshake": (
        KERNELS["handshake"],
        (INT32, INT32, INT64, INT64, INT64, INT64, INT64, 0, 1, 2, 100, "put_signal", True, "add", "relaxed"),
        {"wait_sem": "acquire", "scope": "gpu", "BLOCK": BLOCK},
    ),
    "barriers": (KERNELS["barriers"], (INT64, INT32, INT32, INT64, 1, 4, 5, 0, 2, 2), {}),
    "nothing": (KERNELS["wait_for_nothing"], (INT64, INT64, 0, 2), {}),
    "hammer": (KERNELS["hammer"], (torch.bfloat16, INT64, 0, 2, 8), {}),
    "lock": (KERNELS["locked_increment"], (INT32, INT32, INT64, 0, 2, 8), {}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each in ("ring put_signal", "handshake", "lock") else [pytest.mark.exhaustive])
        for each in LAUNCHED
    ],
)
def test_what_the_tests_launch_compiles(name):
    kernel, args, kwargs = LAUNCHED[name]
    assert assembly(compile_for(kernel, args, kwargs, "sm_90"))


# -- the compiler's cache ---------------------------------------------------------------------------------------------
def test_the_key_of_the_class_depends_on_every_method():
    """A kernel that gets the class as an argument is cached under this key, not under the code that it calls."""
    before = IrisDeviceCtx.cache_key
    assert before == IrisDeviceCtx.cache_key
    kernels = [member for name, member in vars(IrisDeviceCtx).items() if name in language.__all__]
    assert len(kernels) == len(language.__all__)
    for kernel in kernels:
        key, kernel.hash = kernel.cache_key, "other"
        try:
            assert IrisDeviceCtx.cache_key != before
        finally:
            kernel.hash = key
    assert before == IrisDeviceCtx.cache_key
