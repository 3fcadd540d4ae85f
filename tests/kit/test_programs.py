"""The stack suite's own kernels compile for GPUs, where they cannot run here."""

import pytest
import torch

from iris_core.testing.conformance import triton_programs as programs
from iris_triton import language
from iris_triton.compile_only import TARGETS, assembly, compile_for

INT32, INT64 = torch.int32, torch.int64
KERNELS = {
    "ring": (
        programs._ring,
        (language.put, language.signal, language.wait, INT32, INT32, INT32, INT64, 3, 1003, 0, 1, INT64, 10**9),
        {},
    ),
    "all_to_all": (programs._all_to_all, (language.store, INT32, INT32, 1003, 1, INT64), {}),
    "add": (programs._add, (language.atomic_add, INT64, 2, INT64), {}),
    "meet": (
        programs._meet,
        (language.store, language.barrier, INT64, INT64, INT64, 7, 1, INT64, 10**9),
        {"W": 3, "LANES": 4},
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, target):
    kernel, args, kwargs = KERNELS[name]
    text = assembly(compile_for(kernel, args, kwargs, target))
    assert "atom" in text or name == "all_to_all"
