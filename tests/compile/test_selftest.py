"""The kernels of the self-test compile for every GPU target, and reach the other rank as they must."""

import re

import pytest
import torch

from iris_triton.testing import selftest
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for

I32, I64 = torch.int32, torch.int64
KERNELS = {
    "write": (selftest.move, (I32, I32, selftest.NUMEL, I64, 8, 3, False), {"BLOCK": 4096}),
    "read": (selftest.move, (I32, I32, selftest.NUMEL, I64, 8, 3, True), {"BLOCK": 4096}),
    "add": (selftest.add, (I32, I64, selftest.ADDITIONS, I64, 8), {"BLOCK": 128}),
    "hand_over": (selftest.hand_over, (I32, I32, I32, I64, I64, 8, 3, 5), {"BLOCK": selftest.MESSAGE}),
}
ON_NVIDIA = {
    "write": r"st\.global\.v4\.b32",
    "read": r"ld\.global\.v4\.b32",
    "add": r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add\.u32(.|\n)*\.add\.u64",
    "hand_over": r"st\.release\.sys\.global(.|\n)*ld\.acquire\.sys\.global",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name, target):
    kernel, args, kwargs = KERNELS[name]
    text = assembly(compile_for(kernel, args, kwargs, target))
    if target == "sm_90":
        assert re.search(ON_NVIDIA[name], text), text
