"""Kernels that must compile for every GPU target: the conformance kit's programs, which call every device function."""

import torch

from iris_core.testing.conformance import stack_jobs as calls
from iris_core.types import CompileCase, DeviceType
from iris_triton.testing import kit_programs as programs

_I32, _I64 = torch.int32, torch.int64
_W, _TIMEOUT_NS = {"W": 3}, 10**9
_RELEASE = {DeviceType.CUDA: (r"\.release",), DeviceType.HIP: ("buffer_wbl2 sc0 sc1",)}
_ACQUIRE = {DeviceType.CUDA: (r"\.acquire",), DeviceType.HIP: ("buffer_inv sc0 sc1",)}
_ATOMIC = {DeviceType.CUDA: (r"atom\.global[.\w]*\.(sys\.acq_rel|acq_rel\.sys)",), DeviceType.HIP: ("global_atomic",)}
_ACCESS = {DeviceType.CUDA: (r"(ld|st)\.global",), DeviceType.HIP: ("global_(load|store)",)}


def compile_cases(api, in_language=lambda kernel: kernel) -> list[CompileCase]:
    """Return the programs for a backend with such a `device_api()`, with functions and with methods.

    `in_language` makes a kernel of the backend's language from one of Triton.
    """
    return [
        CompileCase(f"{name}-{form}", in_language(kernel), args, kwargs, expect=expect)
        for form in calls.FORMS
        for name, kernel, args, kwargs, expect in _launches(api, api["DeviceContext"] if form == "method" else None)
    ]


def _launches(api, context):
    """Yield name, kernel, arguments and expectations of each program; without a context functions are called."""
    here = _I64, _I64, 0, 1  # context tensor, heap bases, this rank, its peer
    for masked in (False, True):
        sizes = {**_W, "masked": masked, "LANES": 256}
        for name in calls.MOVES:
            args = api[name], context, name, _I32, _I32, _I32, 7, *here, 2
            yield f"{name}-masked={masked}", programs._move, args, sizes, _ACCESS
        for name in calls.ATOMICS:
            args = api[name], context, name, *(_I32,) * 5, *here
            yield f"{name}-masked={masked}", programs._change, args, sizes, _ATOMIC
    for name in calls.ATOMICS:
        args = api[name], context, name, *(_I64,) * 4, *here[:3]
        yield f"{name}-contended", programs._contend, args, _W, _ATOMIC
    for name in calls.SIGNALS:
        for op in calls.OPS:
            functions = api[name], api["put"], api["wait"]
            args = *functions, context, name, op, _I32, _I32, _I32, _I64, 100, 101, *here, _TIMEOUT_NS
            yield f"{name}-{op}", programs._send, args, {**_W, "LANES": 256}, _RELEASE
    for cmp in calls.WAITS:
        args = api["signal"], api["wait"], context, cmp, _I64, 5, 4, _I64, *here, _TIMEOUT_NS
        yield f"wait-{cmp}", programs._await_flag, args, _W, _ACQUIRE
        for name in calls.LOOKS:
            args = api[name], api["signal"], context, name, cmp, _I64, 5, 5, _I64, *here, _TIMEOUT_NS
            yield f"{name}-{cmp}", programs._look, args, _W, _ACQUIRE
    for group in ((False, 0, 1, 3), (True, 0, 2, 2)):
        args = api["store"], api["barrier"], context, _I64, _I64, _I64, 7, *here[:3], _TIMEOUT_NS, *group
        yield f"barrier-group={group[0]}", programs._meet, args, {**_W, "LANES": 4}, _ACQUIRE
