"""The stack suite's own kernels, in Triton and in Gluon, compile for GPUs, where they cannot run here."""

import pytest
import torch

import iris_gluon.language
import iris_triton.language
from iris_core.testing.conformance import device_functions
from iris_gluon import IrisDeviceCtx
from iris_triton import DeviceContext
from iris_triton.testing import kit_programs as programs
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for
from iris_triton.testing.languages import in_gluon

INT32, INT64 = torch.int32, torch.int64
NS = 10**9


DIALECTS = {
    "triton": (iris_triton.language, DeviceContext),
    "gluon": (iris_gluon.language, IrisDeviceCtx),
}


def launches(language, context):
    """(kernel, arguments, keyword arguments) of each program, with a context for methods or None for functions."""
    put, signal, wait, store = language.put, language.signal, language.wait, language.store
    if context is None:
        yield programs._ring, (put, signal, wait, INT32, INT32, INT32, INT64, 3, 1003, 0, 1, INT64, NS), {}
        yield programs._all_to_all, (store, INT32, INT32, 1003, 1, INT64), {}
    where = INT64, INT64
    for name in device_functions.MOVES:
        arguments = getattr(language, name), context, name, INT32, INT32, INT32, 7, *where, 0, 1, 2
        for masked in (False, True):
            yield programs._move, arguments, {"masked": masked, "LANES": 256, "W": 3}
    for name in device_functions.ATOMICS:
        function = getattr(language, name)
        arguments = function, context, name, INT32, INT32, INT32, INT32, INT32, *where, 0, 1
        masked = name != "atomic_cas"
        options = {"masked": masked, "sem": "acq_rel", "scope": "sys", "LANES": 256, "W": 3}
        yield programs._change, arguments, options
        yield programs._contend, (function, context, name, INT64, INT64, INT64, INT64, *where, 0), {"W": 3}
    for name in ("signal", "put_signal"):
        arguments = INT32, INT32, INT32, INT64, 100, 101, *where, 0, 1, NS
        for op in device_functions.OPS:
            yield programs._send, (getattr(language, name), wait, context, name, op, *arguments), {"LANES": 256, "W": 3}
    for each in device_functions.WAITS:
        arguments = signal, wait, context, each.cmp, INT64, each.sent, each.value, INT64, *where, 0, 1, NS
        yield programs._await_flag, arguments, {"W": 3}
        for name in device_functions.LOOKS:
            arguments = getattr(language, name), signal, context, name, each.cmp, INT64, 5, 5, INT64, *where, 0, 1, NS
            yield programs._look, arguments, {"W": 3}
    for grouped in (False, True):
        arguments = store, language.barrier, context, INT64, INT64, INT64, 7, *where, 1, NS, grouped, 0, 2, 2
        yield programs._meet, arguments, {"W": 3, "LANES": 4}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", device_functions.FORMS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_compile(dialect, form, target, some):
    language, context = DIALECTS[dialect]
    cases = list(launches(language, context if form == "method" else None))
    assert len(cases) > 35
    # each combination takes other ones; together all kernels
    start = list(TARGETS).index(target) + 3 * (device_functions.FORMS.index(form) + (dialect == "gluon"))
    for kernel, args, kwargs in some(cases, 8, start):
        kernel = in_gluon(kernel) if dialect == "gluon" else kernel
        assert "global" in assembly(compile_for(kernel, args, kwargs, target))
