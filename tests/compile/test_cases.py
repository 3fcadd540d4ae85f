"""Every device function compiles for every GPU target, in both languages, and its assembly has what it must have."""

import collections
import itertools
import re

import compile_language
import gluon_cases
import pytest
import torch

from iris_core.types import CompileCase, DeviceType
from iris_gluon import IrisDeviceCtx
from iris_triton import language
from iris_triton.context import DeviceContext
from iris_triton.testing import selftest
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for

KINDS = {"cuda": DeviceType.CUDA, "hip": DeviceType.HIP}
(NVIDIA,), AMD = ([name for name, gpu in TARGETS.items() if gpu.backend == each] for each in ("cuda", "hip"))
CONTEXTS = {"triton": DeviceContext, "gluon": IrisDeviceCtx}
INT32, INT64 = torch.int32, torch.int64


def self_test_cases():
    """The kernels of `iris doctor`, and how they reach the other rank."""
    numel, additions, message = selftest.NUMEL, selftest.ADDITIONS, selftest.MESSAGE
    kernels = {
        "write": (selftest.move, (INT32, INT32, numel, INT64, 8, 3, False), {"BLOCK": 4096}, r"st\.global\.v4\.b32"),
        "read": (selftest.move, (INT32, INT32, numel, INT64, 8, 3, True), {"BLOCK": 4096}, r"ld\.global\.v4\.b32"),
        "add": (selftest.add, (INT32, INT64, additions, INT64, 8), {"BLOCK": 128},
                r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add\.u32(.|\n)*\.add\.u64"),
        "hand-over": (selftest.hand_over, (INT32, INT32, INT32, INT64, INT64, 8, 3, 5), {"BLOCK": message},
                      r"st\.release\.sys\.global(.|\n)*ld\.acquire\.sys\.global"),
    }  # fmt: skip
    return [
        CompileCase(f"selftest-{name}", *call, expect={DeviceType.CUDA: (ptx,), DeviceType.HIP: ("global_",)})
        for name, (*call, ptx) in kernels.items()
    ]


LISTS = {"triton": [*compile_language.compile_cases(), *self_test_cases()], "gluon": gluon_cases.compile_cases()}
CASES = {of: {case.name: case for case in cases} for of, cases in LISTS.items()}

RARE = {"collective-reduce-direct", "collective-push-members", "operation-reduce-rows"}
"""Kernels that take long and are compiled in other forms as well: only with --exhaustive."""

SLOW_FOR_AMD = {"operation-ring-gradients"}
"""What takes AMD's compiler seconds, and has the device functions of ring attention: for AMD with --exhaustive."""


def groups():
    """Names of cases with the same code of a vendor's own: what differs is an operation, type or order."""
    found = collections.defaultdict(list)
    for of, cases in CASES.items():
        for name, case in cases.items():
            operation, *how = name.split("-")
            if operation in ("collective", "operation"):
                what = f"{operation}-{case.kernel.__name__}"
            elif operation in ("tile", "experts", "selftest") or operation.startswith("atomic_") or of == "gluon":
                what = operation
            else:
                what = "-".join([operation, *(how[1:-1] if "hint=" in name else how[:1])])
            found[f"{of}-{what}"].append(name)
    return dict(found)


GROUPS = groups()


@pytest.mark.parametrize("group", GROUPS)
def test_assembly(group, request):
    """A group's cases share the targets: one each, in turn, and a single case is compiled for both vendors.

    Of what Triton's kernels are compiled for as well, Gluon takes a half; of eight cases and more, Triton takes a half;
    of tiles both take a fourth.
    """
    of, what = group.split("-", 1)
    names, number = sorted(GROUPS[group], key=lambda name: name in RARE), list(GROUPS).index(group)
    turns = itertools.cycle(each for amd in AMD[number % 2 :] + AMD[: number % 2] for each in (amd, NVIDIA))
    shared = of == "gluon"
    step = 4 if what == "tile" else min(2, len(names)) if shared else 1 + (len(names) >= 8)
    lacking = []
    for i, name in enumerate(names):
        targets = {next(turns)} if len(names) > 1 or shared else {NVIDIA, AMD[number % 2]}
        if name in SLOW_FOR_AMD:
            targets = {NVIDIA}
        if (i + number) % step or name in RARE:
            targets = set()
        if request.config.getoption("exhaustive"):
            targets = TARGETS
        case = CASES[of][name]
        for target in targets:
            text = assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))
            patterns = case.expect[KINDS[TARGETS[target].backend]]
            assert patterns
            lacking += [f"{name} for {target} lacks {each}:\n{text}" for each in patterns if not re.search(each, text)]
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize("of", CONTEXTS)
def test_every_device_function_has_a_case_and_a_method(of):
    assert len(CASES[of]) == len(LISTS[of])
    for function in language.__all__:
        for form in ("function", "method"):
            assert [name for name in CASES[of] if name.startswith(f"{function}-") and f"-{form}" in name], function
    methods = {name for name in vars(CONTEXTS[of]) if not name.startswith("_")}
    assert methods >= {*language.__all__, "initialize", *(["from_tensor"] if of == "triton" else [])}
